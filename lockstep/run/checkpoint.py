"""Train state <-> a folder of safetensors and JSON, from which either framework resumes.

    run/checkpoints/step_00001000/
        weights.safetensors  mu.safetensors  nu.safetensors    by canonical name
        state.json    counters, loss scale, amaxes of narrow formats, dtype, names in canonical
                      order, checksums

Weights that are frozen have no moments.

Several processes write weights-0.safetensors, weights-1.safetensors ..., each its pieces. The
checksum of a file is that of its header, which has those of its tensors: so one can be read alone.
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

from lockstep.errors import UserError, require
from lockstep.files import tensors
from lockstep.files.durable import sync
from lockstep.files.stream import Entry, read_checked, read_entries, write_checked
from lockstep.files.untrusted import Refused
from lockstep.model.state import TrainState
from lockstep.run import pieces, shards
from lockstep.run.record import FILES, MOST, RECORD, read_record, unusable, write_record

NAME = re.compile(r"step_([0-9]{8}|[1-9][0-9]{8,})(\.old)?")


def save(
    run: Path, state: TrainState, *, keep: int, losses: Mapping[int, float] | None = None
) -> Path:
    """Writes `run/checkpoints/step_XXXXXXXX/`; of those up to it the `keep` newest stay, and the
    one with the best of `losses` (validation losses by step).

    Checkpoints of later steps stay: a resume that skipped them as damaged must not delete them.
    Each process calls it with its part; process 0 waits for the others, and alone renames.

    Raises:
        UserError: the disk is full, or the folder cannot be written; nothing of it stays there.
    """
    assert keep >= 1
    folder = run / "checkpoints"
    final = folder / f"step_{state.step:08d}"
    partial = partial_folder(run, state.step)
    rank, count = state.part[:2] if state.part else (0, 1)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sync(run)
        if count == 1:
            sweep(run)
        sums = _write_arrays(partial, state)
        if rank:
            shards.hand_in(partial, rank, sums)
            return final
        write_record(partial, state, sums | shards.gather(partial, count))
        if final.exists():
            os.rename(final, final.with_suffix(".old"))
        os.rename(partial, final)
        sync(folder)
        sweep(run, before=state.step)
        _prune(run, final, keep, losses or {})
    except (OSError, SafetensorError) as error:
        if not rank:
            shutil.rmtree(partial, ignore_errors=True)
        for name in shards.file_names(rank, count).values() if rank else ():
            (partial / name).unlink(missing_ok=True)  # its space is needed
        remedy = "make room there or use another --out"
        raise UserError(f"{final}: cannot be written ({error}); {remedy}") from None
    return final


def partial_folder(run: Path, step: int) -> Path:
    """Where a checkpoint is written before it has its name."""
    return run / "checkpoints" / f".tmp-step_{step:08d}"


def listing(run: Path) -> list[Path]:
    """The checkpoints of a run by name, oldest first; an `.old` one just before its successor.

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
    """Raises UserError if there is none."""
    known = {step_of(path): path for path in listing(run)}
    *most, last = map(str, known or ["another run"])
    choice = f"{', '.join(most)} or {last}" if most else last
    require(step in known, "--step", step, f"{run} has no such checkpoint; use {choice}")
    return known[step]


def best_of(paths: Iterable[Path], losses: Mapping[int, float]) -> Path | None:
    """The checkpoint of the lowest finite loss; None if there is none."""
    known = {path: losses[step_of(path)] for path in paths if step_of(path) in losses}
    finite = [path for path, loss in known.items() if math.isfinite(loss)]
    return min(finite, key=known.__getitem__, default=None)


def newest(run: Path, *, up_to: int | None = None) -> str:
    """The part of an error message that names the newest checkpoint, up to a step."""
    paths = [path for path in listing(run) if up_to is None or step_of(path) <= up_to]
    return f"the last good checkpoint is {paths[-1]}" if paths else "no good checkpoint is saved"


def load(path: Path) -> TrainState:
    """Reads one checkpoint, bit for bit what was saved.

    Raises:
        UserError: a file is missing, damaged, not Lockstep's, or of a newer version.
    """
    state = open_state(path)
    fields = state.params, state.mu, state.nu
    params, mu, nu = ({name: x[...] for name, x in arrays.items()} for arrays in fields)
    return replace(state, params=params, mu=mu, nu=nu)


def open_state(path: Path) -> TrainState:
    """The same, but for what the tensors hold: that is read, and may be refused, where it is asked
    for (`lockstep.run.pieces.Saved`). A process of several needs a part."""
    try:
        record = read_record(path / RECORD)
        loaded = {field: _open_shards(path, field, record) for field in FILES}
    except OSError as error:
        raise _unreadable(path, error) from None
    shapes = {name: array.shape for name, array in loaded["params"].items()}
    wanted = {name: (shapes.get(name), record["dtype"]) for name in record["names"]}
    moments = {name: wanted[name] for name in wanted if name not in set(record["frozen"])}
    names = shards.file_names(0, record["shards"])
    for field, name in names.items():
        if _layout(loaded[field]) != (wanted if field == "params" else moments):
            why = f"its tensors are not those of {RECORD} and {names['params']}"
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


def weight_files(path: Path) -> list[Path]:
    """Those of all shards, if they are whole; they are read, and not kept.

    Raises:
        UserError: a file is missing, damaged, not Lockstep's, or of a newer version.
    """
    try:
        return _read_files(path, ["params"])
    except OSError as error:
        raise _unreadable(path, error) from None


def is_whole(path: Path) -> bool:
    """Whether all its files are there, as they were written."""
    try:
        return bool(_read_files(path, FILES))
    except (OSError, UserError, Refused):
        return False


def _read_files(path: Path, fields: Iterable[str]) -> list[Path]:
    """Of some fields, all shards; every tensor is read once."""
    record = read_record(path / RECORD)
    names = [shards.file_names(shard, record["shards"]) for shard in range(record["shards"])]
    files = [path / each[field] for field in fields for each in names]
    for file in files:
        for entry in _entries(file, record).values():
            _read(file, entry)
    return files


def newest_weight_files(run: Path, warn: Callable[[str], None]) -> list[Path]:
    """Of the newest checkpoint whose weights are whole; else as `latest`."""
    return _newest(run, warn, weight_files)


def latest(run: Path, warn: Callable[[str], None], *, in_parts: bool = False) -> TrainState:
    """The newest checkpoint that loads; `warn` gets one line for each newer one that does not.

    in_parts: what its tensors hold is not looked at yet, as by `open_state`.

    Raises:
        UserError: none does.
    """
    return _newest(run, warn, open_state if in_parts else load)


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
    """The checksums of the files."""
    layout, moments = _layout(state.params), _layout(state.mu)
    assert layout.items() >= moments.items() == _layout(state.nu).items(), "unlike the weights"
    rank, count = state.part[:2] if state.part else (0, 1)
    folder.mkdir(exist_ok=count > 1)
    names = shards.file_names(rank, count)
    return {
        name: write_checked(folder / name, getattr(state, field)) for field, name in names.items()
    }


def _open_shards(path: Path, field: str, record: dict[str, Any]) -> dict[str, pieces.Saved]:
    count = record["shards"]
    files = [path / shards.file_names(shard, count)[field] for shard in range(count)]
    try:
        return pieces.find(((file, _entries(file, record)) for file in files), _read)
    except Refused as why:
        raise unusable(files[0], str(why)) from None


def _entries(file: Path, record: dict[str, Any]) -> dict[str, Entry]:
    try:
        return read_entries(file, record["sha256"][file.name])
    except tensors.Damaged:
        raise _damaged(file) from None
    except Refused as why:
        raise unusable(file, f"damaged or not a Lockstep checkpoint ({why})") from None


def _read(file: Path, entry: Entry) -> np.ndarray:
    try:
        return read_checked(file, entry)
    except OSError as error:
        raise _unreadable(file, error) from None
    except Refused:
        raise _damaged(file) from None


def _layout(arrays: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name -> shape, dtype."""
    return {name: (array.shape, array.dtype.name) for name, array in arrays.items()}


def _unreadable(path: Path, error: OSError) -> UserError:
    return unusable(error.filename or path, f"cannot be read ({error.strerror})")


def _damaged(file: Path) -> UserError:
    return unusable(file, f"damaged, its checksum is not that in {RECORD}")


def sweep(run: Path, *, before: int = MOST + 1) -> None:
    """Deletes partial checkpoints, which a kill leaves, and `.old` ones with a successor.

    before: a step from which on another process may be writing.
    """
    for path in (run / "checkpoints").glob(".tmp-*"):
        number = path.stem.rpartition("_")[2]
        if not number.isdecimal() or int(number) < before:
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
    """Renames first: half deleted, it must not count as a checkpoint."""
    gone = path.with_name(f".tmp-{path.name}")
    os.rename(path, gone)
    shutil.rmtree(gone)
