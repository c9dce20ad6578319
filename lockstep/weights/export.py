"""Exports a run's checkpoint to a folder that transformers loads, one tensor at a time.

The folder has config.json, model.safetensors, and the tokenizer files of the run.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.config import ModelConfig, huggingface
from lockstep.convert.containers import Checkpoint, TensorInfo, dtype_of
from lockstep.convert.convert import write_file, write_shards
from lockstep.errors import UserError, require
from lockstep.files.untrusted import Refused, read_json
from lockstep.model.params import shapes
from lockstep.run import checkpoint, directory
from lockstep.weights import about
from lockstep.weights.adapters import write_adapters
from lockstep.weights.huggingface import SINGLE
from lockstep.weights.merged import Weights, open_weights
from lockstep.weights.names import of_transformers

# Keys of transformers 5, for which `config_json` has those that transformers 4 reads too.
RENAMED = ("rope_parameters", "dtype", "layer_types")


def export(
    run: Path,
    to: Path,
    *,
    step: int | None = None,
    dtype: str = "",
    warn: Any,
    shard_bytes: int | None = None,
    only_adapters: bool = False,
) -> Path:
    """Export a checkpoint for transformers or PEFT; return its folder.

    Args:
        step: whose checkpoint; None for the newest whose weights are whole.
        dtype: of the exported weights; "" for the run's own.
        shard_bytes: the most of a file, if it has more than one tensor; None for one file.
        only_adapters: as PEFT has them; else they are merged with the weights.

    Raises:
        UserError: the run or its weights are damaged, transformers has no such model, `to` is
            taken or cannot be written. Nothing is there then.
    """
    config = directory.read_record(run).config
    model = replace(config.model, padded_vocab=0)
    huggingface.family_of(model.base)
    has = model.lora_rank > 0 or not only_adapters
    require(has, "--adapters", run, "was trained without; drop it")
    directory.require_empty(to, "--to")
    file = file_of(run, step, warn)
    try:
        with directory.new_folder(to, "--to") as folder:
            weights = open_weights(file, model)
            dtype = dtype or weights.dtype
            if only_adapters:
                write_adapters(folder, config, weights, dtype)
            else:
                _write_weights(folder, weights, dtype, shard_bytes)
                _write_config(folder, run, model.base, dtype)
    except Refused as error:
        raise UserError(f"{file}: {error}; use another checkpoint") from None
    return file.parent


def file_of(run: Path, step: int | None, warn: Any) -> Path:
    """Find the file of a checkpoint's weights; None: of the newest whose weights are sound."""
    if step is None:
        return checkpoint.newest_weight_file(run, warn)
    return checkpoint.weight_file(checkpoint.of_step(run, step))


def _write_weights(folder: Path, weights: Weights, dtype: str, shard_bytes: int | None) -> None:
    base = weights.model.base
    plan = of_transformers(base).plan(shapes(base), back=True)
    source, target = (
        {name: TensorInfo(shape, dtype_of(dtype)) for name, shape in sizes.items()}
        for sizes in (shapes(base), plan.shapes)
    )
    merged = Checkpoint(source, lambda name: weights.merged(name, dtype))
    if shard_bytes is None:
        write_file(folder / SINGLE, plan, merged, target)
    else:
        write_shards(folder, plan, merged, target, shard_bytes)


def _write_config(folder: Path, run: Path, model: ModelConfig, dtype: str) -> None:
    about.copy(about.MODEL + about.TOKENIZER, run / about.FOLDER, folder, links=False)
    content = huggingface.config_json(model, dtype)
    former = folder / about.CONFIG
    if former.exists():
        content = _merged(run, model, content)
    former.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _merged(run: Path, model: ModelConfig, content: dict[str, Any]) -> dict[str, Any]:
    """Add what the config that the run started from says beside the model, such as token ids."""
    path = run / about.FOLDER / about.CONFIG
    try:
        former = read_json(path, limit=huggingface.LARGEST_FILE)
    except Refused as why:
        raise UserError(f"{path}: {why}; restore it") from None
    former = {name: value for name, value in former.items() if name not in RENAMED}
    if model.position == "rope" and "max_position_embeddings" in former:
        del content["max_position_embeddings"]  # it still has them; --context is the run's
    return former | content
