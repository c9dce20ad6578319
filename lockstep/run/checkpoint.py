"""Saves and loads the training state: safetensors and JSON, for either framework.

    run/checkpoints/step_00001000/
        weights.safetensors  mu.safetensors  nu.safetensors    by canonical name
        state.json    counters, loss scale, amaxes of narrow formats, dtype, names in canonical
                      order, checksums

Weights that are frozen have no moments. Rank 0 writes; every rank reads the parts that it needs.
A reader compares all files with their checksums before it opens one (decision 58).

A checkpoint appears under its name whole or not at all: it is written next to it, synced to the
disk, renamed. Names that begin with `.tmp-` are what a kill left behind. A name that ends in
`.old` is the former checkpoint of a step that is saved again: it counts as a checkpoint until its
successor is in place, so that no kill can fall between them.
"""

import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from lockstep.errors import UserError, require
from lockstep.files.durable import sync
from lockstep.files.stream import TensorFile, checksum
from lockstep.model.state import TrainState
from lockstep.run.record import (
    FILES,
    RECORD,
    read_record,
    reading,
    unusable,
    write_record,
)

NAME = re.compile(r"step_([0-9]{8}|[1-9][0-9]{8,})(\.old)?")


def save(
    run: Path, state: TrainState, *, keep: int, losses: Mapping[int, float] | None = None
) -> Path:
    """Write `run/checkpoints/step_XXXXXXXX/`, and delete what `keep` leaves out.

    The `keep` newest up to it stay, and the one with the best of `losses` (validation losses by
    step). Those of later steps stay: a resume that skipped them as damaged must not delete them.

    Raises:
        UserError: the disk is full, or the folder cannot be written; nothing of it stays there.
    """
    assert keep >= 1
    folder = run / "checkpoints"
    final = folder / f"step_{state.step:08d}"
    partial = folder / f".tmp-{final.name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sync(run)
        sweep(run)
        partial.mkdir()
        write_record(partial, state, _write_arrays(partial, state))
        if final.exists():
            os.rename(final, final.with_suffix(".old"))
        os.rename(partial, final)
        sync(folder)
        sweep(run)
        _prune(run, final, keep, losses or {})
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)  # its space is needed
        remedy = "make room there or use another --out"
        raise UserError(f"{final}: cannot be written ({error}); {remedy}") from None
    return final


def listing(run: Path) -> list[Path]:
    """Lists the checkpoints of a run, oldest first; an `.old` one just before its successor.

    A link is none: it may lead out of the run, where nothing is ours to read or to delete.
    """
    order = {}
    for path in (run / "checkpoints").glob("step_*"):
        match = NAME.fullmatch(path.name)
        if match and path.is_dir() and not os.path.islink(path):
            order[path] = (int(match[1]), match[2] is None)
    return sorted(order, key=order.__getitem__)


def step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step_"))


def of_step(run: Path, step: int) -> Path:
    """Finds the checkpoint of a step; raises UserError if there is none."""
    known = {step_of(path): path for path in listing(run)}
    *most, last = map(str, known or ["another run"])
    choice = f"{', '.join(most)} or {last}" if most else last
    require(step in known, "--step", step, f"{run} has no such checkpoint; use {choice}")
    return known[step]


def best_of(paths: Iterable[Path], losses: Mapping[int, float]) -> Path | None:
    """Finds the checkpoint of the lowest finite loss; None if there is none."""
    known = {path: losses[step_of(path)] for path in paths if step_of(path) in losses}
    finite = [path for path, loss in known.items() if math.isfinite(loss)]
    return min(finite, key=known.__getitem__, default=None)


def newest(run: Path, *, up_to: int | None = None) -> str:
    """Writes the part of an error message that names the newest checkpoint, up to a step."""
    paths = [path for path in listing(run) if up_to is None or step_of(path) <= up_to]
    return f"the last good checkpoint is {paths[-1]}" if paths else "no good checkpoint is saved"


def load(path: Path) -> TrainState:
    """Read one checkpoint, bit for bit what was saved; errors as `open_state`'s."""
    state = open_state(path)
    fields = state.params, state.mu, state.nu
    params, mu, nu = ({name: x[...] for name, x in arrays.items()} for arrays in fields)
    return replace(state, params=params, mu=mu, nu=nu)


def open_state(path: Path) -> TrainState:
    """Open one checkpoint, whose tensors are read where they are indexed (`SavedTensor`).

    A rank that has a shard of a tensor reads no more of it.

    Raises:
        UserError: a file is missing, damaged, not Lockstep's, or of a newer version.
    """
    record = read_record(path / RECORD)
    loaded = {field: _open_file(path / name, record).tensors() for field, name in FILES.items()}
    shapes = {name: array.shape for name, array in loaded["params"].items()}
    wanted = {name: (shapes.get(name), record["dtype"]) for name in record["names"]}
    moments = {name: wanted[name] for name in wanted if name not in set(record["frozen"])}
    for field, name in FILES.items():
        if _layout(loaded[field]) != (wanted if field == "params" else moments):
            why = f"its tensors are not those of {RECORD} and {FILES['params']}"
            raise unusable(path / name, why)
    arrays: Any = {  # as far as a twin asks of them
        field: {name: loaded[field][name] for name in (wanted if field == "params" else moments)}
        for field in FILES
    }
    return TrainState(
        **arrays,
        step=record["step"],
        updates=record["updates"],
        loss_scale=record["loss_scale"],
        good_steps=record["good_steps"],
        amaxes={name: np.array(rows, np.float32) for name, rows in record["amaxes"].items()},
    )


def weight_file(path: Path) -> Path:
    """Find the file of the weights, compared with its checksum; errors as `open_state`'s."""
    return _open_file(path / FILES["params"], read_record(path / RECORD)).path


def is_whole(path: Path) -> bool:
    """Says if all files of a checkpoint are present and unchanged."""
    try:
        open_state(path)
    except UserError:
        return False
    return True


def newest_weight_file(run: Path, warn: Callable[[str], None]) -> Path:
    """Find the weights of the newest checkpoint whose weights are sound; else as `latest`."""
    return _newest(run, warn, weight_file)


def latest(run: Path, warn: Callable[[str], None], *, lazy: bool = False) -> TrainState:
    """Loads the newest sound checkpoint; `warn` gets a line for each newer one that fails.

    lazy: tensors are read where they are indexed, as by `open_state`.

    Raises:
        UserError: none does.
    """
    return _newest(run, warn, open_state if lazy else load)


def _newest(run: Path, warn: Callable[[str], None], read: Callable[[Path], Any]) -> Any:
    paths, skipped = listing(run), []
    for path in reversed(paths):
        try:
            found = read(path)
        except UserError as error:
            skipped.append(str(error))
            continue
        for problem in skipped:
            warn(f"{problem}; the last good one is {path}")
        return found
    for problem in skipped:
        warn(problem)
    problem = f"none of its {len(paths)} checkpoints loads" if paths else "it has no checkpoint"
    raise UserError(f"{run}: {problem}; use --overwrite to start again")


def _write_arrays(folder: Path, state: TrainState) -> dict[str, str]:
    """Write the files of tensors; returns their checksums."""
    layout, moments = _layout(state.params), _layout(state.mu)
    assert layout.items() >= moments.items() == _layout(state.nu).items(), "unlike the weights"
    return {name: _write(folder / name, getattr(state, field)) for field, name in FILES.items()}


def _write(path: Path, arrays: Mapping[str, np.ndarray]) -> str:
    """Write a file of tensors, durably; returns its checksum.

    Raises:
        OSError, SafetensorError: the disk is full, or the folder cannot be written.
    """
    # save_file writes memory as it lies, which for a transposed view is silently wrong;
    # np.ascontiguousarray would turn a scalar into a vector.
    save_file({name: np.asarray(x, order="C") for name, x in arrays.items()}, path)
    sync(path)
    return checksum(path)


def _open_file(file: Path, record: dict[str, Any]) -> TensorFile:
    """Open a file of tensors after comparing its checksum."""
    with reading(file):
        if checksum(file) != record["sha256"][file.name]:
            raise unusable(file, f"damaged, its checksum is not that in {RECORD}")
        return TensorFile(file, links=False)


def _layout(arrays: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Maps names to shapes and dtypes."""
    return {name: (array.shape, array.dtype.name) for name, array in arrays.items()}


def sweep(run: Path) -> None:
    """Deletes partial checkpoints, which a kill leaves, and `.old` ones with a successor."""
    for path in (run / "checkpoints").glob(".tmp-*"):
        shutil.rmtree(path)
    for path in listing(run):
        if path.suffix == ".old" and path.with_suffix("").exists():
            delete(path)


def _prune(run: Path, newest: Path, keep: int, losses: Mapping[int, float]) -> None:
    paths = listing(run)
    paths = paths[: paths.index(newest) + 1]
    best = best_of(paths, losses)
    for path in paths[:-keep]:
        if path != best:
            delete(path)


def delete(path: Path) -> None:
    """Deletes a checkpoint; renames it first, so that half of one never counts."""
    gone = path.with_name(f".tmp-{path.name}")
    os.rename(path, gone)
    shutil.rmtree(gone)
