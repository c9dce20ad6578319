"""A run's checkpoint -> a folder that JAX alone runs: a program in StableHLO, and its weights.

The program is the forward pass of the JAX twin, which a process of its own exports.
"""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from lockstep.config import Config, ModelConfig, OptimConfig, PrecisionConfig, RunConfig
from lockstep.config.tensors import shapes
from lockstep.errors import UserError
from lockstep.files.stream import write
from lockstep.files.untrusted import Refused
from lockstep.run import directory
from lockstep.weights.export import files_of
from lockstep.weights.merged import open_weights
from lockstep.worker import Failed, Worker, silent, start_service

EXPORTER = "jax_impl.io.stablehlo"
PROGRAM, TEXT, WEIGHTS = "model.jax", "model.mlir", "model.safetensors"


def export_stablehlo(run: Path, to: Path, *, step: int | None, warn: Callable[[str], None]) -> int:
    """Bytes of the program and its weights, which are in float32.

    Raises:
        UserError: the run is damaged, JAX is not installed or refuses the model, `to` is taken or
            cannot be written. Nothing is there then.
    """
    model = replace(directory.read_record(run).config.model, padded_vocab=0)
    directory.require_empty(to, "--to")
    files = files_of(run, step, warn)
    config = forward_config(model.base)
    try:
        with directory.new_folder(to, "--to") as folder:
            weights, sizes = open_weights(files, model), shapes(model.base)
            tensors = (weights.merged(name, "float32") for name in sizes)
            write(folder / WEIGHTS, "float32", sizes, tensors)
            with closing(Worker("", partial(start_service, EXPORTER), silent)) as worker:
                worker.ask("export_forward", config=config.to_json(), folder=str(folder))
            return sum((folder / name).stat().st_size for name in (PROGRAM, WEIGHTS))
    except Failed as failed:
        why = f"JAX says {failed.text}; use --format onnx"
        raise UserError(f"--format stablehlo: {why}") from None
    except Refused as error:
        raise UserError(f"{files[0]}: {error}; use another checkpoint") from None


def forward_config(model: ModelConfig) -> Config:
    """In float32; strict numerics write attention out, whatever the length."""
    return Config(
        model=replace(model, dropout=0.0),
        precision=PrecisionConfig(policy="fp32", numerics="strict"),
        optim=OptimConfig(batch_size=1), run=RunConfig(device="cpu"),
    )  # fmt: skip
