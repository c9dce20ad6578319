"""A checkpoint's state.json: counters, a description of tensors, checksums."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.errors import UserError
from lockstep.files import stream
from lockstep.files.durable import sync
from lockstep.files.untrusted import Refused, read_json
from lockstep.formats.table import HISTORY
from lockstep.model.state import COUNTERS, TrainState
from lockstep.run import shards

FORMAT = 3  # another one where FIELDS change, or what their values mean
OLDEST = 2  # whose checksum of a file is that of its header, which has those of its tensors
FILES = shards.file_names(0, 1)
RECORD = "state.json"
RECORD_LIMIT = 2_000_000  # bytes
FIELDS: dict[str, type] = {
    "format": int, "step": int, "updates": int, "loss_scale": float, "good_steps": int,
    "amaxes": dict, "dtype": str, "names": list, "frozen": list, "shards": int, "sha256": dict,
}  # fmt: skip
MOST = 2**31 - 1  # that a counter can be: both frameworks count in int32


def write_record(folder: Path, state: TrainState, sums: dict[str, str]) -> None:
    """Write state.json, durably.

    Args:
        sums: the SHA-256 of each file of tensors, by its name.
    """
    dtypes = {array.dtype.name for array in state.params.values()}
    assert len(dtypes) == 1, f"one param dtype expected, not {dtypes}"
    if state.part:
        names, frozen, count = state.part.names, state.part.frozen, state.part.processes
    else:
        names, frozen, count = (*state.params,), (*(state.params.keys() - state.mu.keys()),), 1
    record: dict[str, Any] = {"format": FORMAT}
    record |= {name: getattr(state, name) for name in COUNTERS}
    record |= {"amaxes": {name: history.tolist() for name, history in state.amaxes.items()}}
    record |= {"dtype": dtypes.pop(), "names": names, "frozen": sorted(frozen)}
    record |= {"shards": count, "sha256": sums}
    record["sha256"][RECORD] = own_checksum(record)
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    sync(folder / RECORD)
    sync(folder)


def read_record(file: Path) -> dict[str, Any]:
    """Read state.json.

    Raises:
        UserError: it cannot be read, is damaged, foreign, or of another format.
    """
    with reading(file):
        record = read_json(file, limit=RECORD_LIMIT)
    number = record.get("format")
    if type(number) is int and number > 0 and not OLDEST <= number <= FORMAT:
        problem = f"format {number}, this version reads {OLDEST} to {FORMAT}"
        remedy = "upgrade Lockstep" if number > FORMAT else "use the commit that config.json names"
        raise UserError(f"{file}: {problem}; {remedy} or use another checkpoint")
    if not (type(number) is int and number > 0 and _is_whole(record)):
        raise unusable(file, "damaged or not a Lockstep checkpoint")
    return record


def _is_whole(record: dict[str, Any]) -> bool:
    """Says if each field has its type and its range, and the record the checksum that it states."""
    if record.keys() != FIELDS.keys():
        return False
    if any(type(record[name]) is not kind for name, kind in FIELDS.items()):
        return False
    names, sums, count = record["names"], record["sha256"], record["shards"]
    return (
        all(0 <= record[name] <= MOST for name in ("step", "updates", "good_steps"))
        and record["loss_scale"] >= 0  # it has no floor: too low, it becomes 0
        and all(map(_is_history, record["amaxes"].values()))
        and record["dtype"] in stream.DTYPES.values()
        and all(type(name) is str for name in (*names, *record["frozen"], *sums.values()))
        and len(names) == len(set(names)) > 0
        and set(record["frozen"]) < set(names)
        and len(sums) == 1 + len(FILES) * count
        and sums.keys() == {RECORD, *_files(count)}
        and sums[RECORD] == own_checksum(record)
    )


def _is_history(sizes: Any) -> bool:
    """Says if these are three rows of finite sizes."""
    try:
        array = np.array(sizes)
    except ValueError:  # rows of several lengths
        return False
    if array.dtype != np.float64 or array.shape != (3, HISTORY):
        return False
    return bool((np.isfinite(array) & (array >= 0)).all())


def own_checksum(record: dict[str, Any]) -> str:
    """Compute a record's checksum, of all its other fields; `repr` keeps floats exactly."""
    others = {name: sha for name, sha in record["sha256"].items() if name != RECORD}
    return hashlib.sha256(json.dumps(record | {"sha256": others}).encode()).hexdigest()


def _files(count: int) -> list[str]:
    return [name for shard in range(count) for name in shards.file_names(shard, count).values()]


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Turn an error in a checkpoint's file into a UserError."""
    try:
        yield
    except OSError as error:
        raise unusable(file, f"cannot be read ({error.strerror})") from None
    except Refused as why:
        raise unusable(file, f"damaged or not a Lockstep checkpoint ({why})") from None


def unusable(file: Path | str, why: str) -> UserError:
    """Make the error of a checkpoint's file."""
    return UserError(f"{file}: {why}; use another checkpoint")
