"""A run's checkpoint -> a folder that transformers loads: config.json, model.safetensors, and what
the run started with of tokenizer files. One tensor is in memory at a time."""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.config import ModelConfig, huggingface
from lockstep.errors import UserError, require
from lockstep.files.untrusted import Refused, read_json
from lockstep.model.params import shapes
from lockstep.run import checkpoint, directory
from lockstep.weights import about
from lockstep.weights.huggingface import SINGLE
from lockstep.weights.names import Layout, of_transformers
from lockstep.weights.stream import TensorFile, write

# Keys of transformers 5, for which `config_json` has those that transformers 4 reads too.
RENAMED = ("rope_parameters", "dtype", "layer_types")


def export(run: Path, to: Path, *, step: int | None, dtype: str, warn: Any) -> Path:
    """The checkpoint that was exported.

    Args:
        step: whose checkpoint; None for the newest whose weights are whole.
        dtype: of the exported weights; "" for the run's own.

    Raises:
        UserError: the run or its weights are damaged, transformers has no such model, `to` is
            taken or cannot be written. Nothing is there then.
    """
    record = directory.read_record(run)
    model = replace(record.config.model, padded_vocab=0)
    huggingface.family_of(model)
    _require_free(to)
    if step is None:
        path = checkpoint.newest_whole(run, warn)
    else:
        path = checkpoint.of_step(run, step)
        checkpoint.verify_weights(path)
    partial = to.with_name(f".tmp-{to.name}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        _write(partial, run, path, model, dtype)
        os.rename(partial, to)
    except OSError as error:
        raise UserError(f"--to {to}: cannot be written ({error.strerror}); make room") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return path


def _require_free(to: Path) -> None:
    directory.require_writable(to, "--to")
    taken = to.exists() and any(to.iterdir())
    require(not taken, "--to", to, "is not empty; name another folder")


def _write(folder: Path, run: Path, path: Path, model: ModelConfig, dtype: str) -> None:
    file = path / checkpoint.FILES["params"]
    try:
        with TensorFile(file) as tensors:
            own = {entry.dtype for entry in tensors.entries.values()}
            dtype = dtype or own.pop()
            layout = of_transformers(model)
            write(folder / SINGLE, dtype, layout.shapes(), _tensors(tensors, layout, dtype))
    except (Refused, KeyError) as error:
        raise UserError(f"{file}: {error}; use another checkpoint") from None
    about.hand_on(run, folder)
    content = huggingface.config_json(model, dtype)
    former = folder / about.CONFIG
    if former.exists():
        content = _merged(run, model, content)
    former.write_text(json.dumps(content, indent=2) + "\n")


def _merged(run: Path, model: ModelConfig, content: dict[str, Any]) -> dict[str, Any]:
    """With what the config that the run started from says beside the model, such as token ids."""
    path = run / about.FOLDER / about.CONFIG
    try:
        former = read_json(path, limit=huggingface.LARGEST_FILE)
    except Refused as why:
        raise UserError(f"{path}: {why}; restore it") from None
    former = {name: value for name, value in former.items() if name not in RENAMED}
    if model.position == "rope" and "max_position_embeddings" in former:
        del content["max_position_embeddings"]  # it still has them; --context is the run's
    return former | content


def _tensors(tensors: TensorFile, layout: Layout, dtype: str) -> Iterator[np.ndarray]:
    for name, shape in shapes(layout.model).items():
        whole = np.empty(shape, tensors.entries[name].dtype)
        tensors.read(name, whole)  # of a padded vocabulary the tokens' rows
        with np.errstate(over="ignore"):
            cast = whole.astype(dtype, copy=False)
        fits = bool((np.isfinite(cast) == np.isfinite(whole)).all())
        require(fits, "--dtype", dtype, f"has no numbers as large as some of {name}; use bfloat16")
        yield from layout.split(name, cast).values()
