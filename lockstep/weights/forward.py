"""The forward pass of a run's checkpoint, exported by one twin for a run of either.

The twin exports in a process of its own, so that a command imports no framework.
"""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from lockstep.config import (
    Config,
    ExecutionConfig,
    ModelConfig,
    OptimConfig,
    PrecisionConfig,
    RunConfig,
)
from lockstep.config.tensors import shapes
from lockstep.convert.containers import TargetFile, TensorInfo, dtype_of
from lockstep.errors import UserError
from lockstep.files.untrusted import Refused
from lockstep.run import directory
from lockstep.weights.export import file_of
from lockstep.weights.merged import open_weights
from lockstep.worker import Failed, Worker, silent, start_service

WEIGHTS = "model.safetensors"


@contextmanager
def exported(
    run: Path, to: Path, exporter: str, *, step: int | None, warn: Callable[[str], None]
) -> Iterator[Path]:
    """Export to a new folder, which is there when the block ends.

    It has the weights in float32, adapters merged, and what the exporter writes beside them.

    Args:
        exporter: the module whose `export_forward` takes a configuration and the folder.

    Raises:
        UserError: the run is damaged, the framework is missing or refuses the model, `to` is taken
            or cannot be written. Nothing is there then.
    """
    model = replace(directory.read_record(run).config.model, padded_vocab=0)
    directory.require_empty(to, "--to")
    file = file_of(run, step, warn)
    try:
        with directory.new_folder(to, "--to") as folder:
            weights, sizes = open_weights(file, model), shapes(model.base)
            target = TargetFile(
                folder / WEIGHTS,
                {name: TensorInfo(shape, dtype_of("float32")) for name, shape in sizes.items()},
            )
            for name in sizes:
                target.tensor(name)[...] = weights.merged(name, "float32")
            config = forward_config(model.base).to_json()
            with closing(Worker("", partial(start_service, exporter), silent)) as worker:
                worker.ask("export_forward", config=config, folder=str(folder))
            yield folder
    except Failed as failed:
        problem = f"{exporter} says {failed.text}; use another format"
        raise UserError(f"--format: {problem}") from None
    except Refused as error:
        raise UserError(f"{file}: {error}; use another checkpoint") from None


def forward_config(model: ModelConfig) -> Config:
    """Configure float32 under strict numerics, which write attention out at every length."""
    return Config(
        model=replace(model, dropout=0.0),
        precision=PrecisionConfig(policy="fp32", numerics="strict"),
        optim=OptimConfig(batch_size=1, accum=1), execution=ExecutionConfig(remat="none"),
        run=RunConfig(device="cpu"),
    )  # fmt: skip
