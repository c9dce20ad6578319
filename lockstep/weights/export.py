"""A run's checkpoint -> a folder that transformers loads: config.json, model.safetensors, and what
the run started with of tokenizer files. One tensor is in memory at a time."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.config import ModelConfig, huggingface
from lockstep.errors import UserError, require
from lockstep.files.untrusted import Refused, read_json
from lockstep.model.params import Arrays, shapes
from lockstep.run import checkpoint, directory
from lockstep.run.shards import assemble
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
        files = checkpoint.newest_weight_files(run, warn)
    else:
        files = checkpoint.weight_files(checkpoint.of_step(run, step))
    partial = to.with_name(f".tmp-{to.name}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        _write(partial, run, files, model, dtype)
        os.rename(partial, to)
    except OSError as error:
        raise UserError(f"--to {to}: cannot be written ({error.strerror}); make room") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return files[0].parent


def _require_free(to: Path) -> None:
    directory.require_writable(to, "--to")
    taken = to.exists() and any(to.iterdir())
    require(not taken, "--to", to, "is not empty; name another folder")


def _write(folder: Path, run: Path, files: list[Path], model: ModelConfig, dtype: str) -> None:
    try:
        with ExitStack() as stack:
            shards = [stack.enter_context(TensorFile(file)) for file in files]
            dtype = dtype or next(iter(shards[0].entries.values())).dtype
            layout = of_transformers(model)
            write(folder / SINGLE, dtype, layout.shapes(), _tensors(shards, layout, dtype))
    except (Refused, StopIteration) as error:
        raise UserError(f"{files[0]}: {error or 'is empty'}; use another checkpoint") from None
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


def _tensors(shards: list[TensorFile], layout: Layout, dtype: str) -> Iterator[np.ndarray]:
    for name, shape in shapes(layout.model).items():
        whole = assemble(_pieces(file, name) for file in shards).get(name, np.empty(0))
        whole = whole[: shape[0]]  # of a padded vocabulary the tokens' rows
        if whole.shape != shape:
            raise Refused(f"{name} is of shape {whole.shape}, not {shape}")
        with np.errstate(over="ignore"):
            cast = whole.astype(dtype, copy=False)
        fits = bool((np.isfinite(cast) == np.isfinite(whole)).all())
        require(fits, "--dtype", dtype, f"has no numbers as large as some of {name}; use bfloat16")
        yield from layout.split(name, cast).values()


def _pieces(file: TensorFile, name: str) -> Arrays:
    """Those of one tensor."""
    found = {}
    for key, entry in file.entries.items():
        if key.partition("@")[0] == name:
            found[key] = np.empty(entry.shape, entry.dtype)
            file.read(key, found[key])
    return found
