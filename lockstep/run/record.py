"""A checkpoint's state.json: its counters, what its tensors are, and its checksums."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

from lockstep.errors import UserError
from lockstep.files import tensors
from lockstep.files.durable import sync
from lockstep.files.untrusted import Refused, read_json
from lockstep.formats.table import HISTORY
from lockstep.model.state import TrainState
from lockstep.run import shards

FORMAT = 2  # another one where FIELDS change
FILES = shards.file_names(0, 1)
RECORD = "state.json"
RECORD_LIMIT = 2_000_000  # bytes
COUNTERS = ("step", "updates", "loss_scale", "good_steps")
FIELDS = {"format", *COUNTERS, "amaxes", "dtype", "names", "frozen", "shards", "sha256"}
MOST = 2**31 - 1  # that a counter can be: both frameworks count in int32


def write_record(folder: Path, state: TrainState, sums: dict[str, str]) -> None:
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
    try:
        record = read_json(file, limit=RECORD_LIMIT)
    except Refused as why:
        raise unusable(file, f"damaged or not a Lockstep checkpoint ({why})") from None
    number = record.get("format")
    if type(number) is int and 0 < number != FORMAT:
        problem = f"format {number}, this version reads {FORMAT}"
        remedy = "upgrade Lockstep" if number > FORMAT else "use the commit that config.json names"
        raise UserError(f"{file}: {problem}; {remedy} or use another checkpoint")
    if not ((type(number), number) == (int, FORMAT) and _is_whole(record)):
        raise unusable(file, "damaged or not a Lockstep checkpoint")
    return record


def _is_whole(record: dict[str, Any]) -> bool:
    """Every field there, of its type and in its range, and the record that of its checksum."""
    if record.keys() != FIELDS:
        return False
    counts, scale = (record["step"], record["updates"], record["good_steps"]), record["loss_scale"]
    names, sums, count = record["names"], record["sha256"], record["shards"]
    frozen = record["frozen"]
    return (
        all(type(count) is int and 0 <= count <= MOST for count in counts)
        and type(scale) is float
        and scale >= 0  # it has no floor: too low, it becomes 0
        and _are_histories(record["amaxes"])
        and record["dtype"] in tensors.DTYPES.values()
        and type(names) is list
        and len(names) > 0
        and all(type(name) is str for name in names)
        and len(set(names)) == len(names)
        and type(frozen) is list
        and all(type(name) is str for name in frozen)
        and set(frozen) < set(names)
        and type(sums) is dict
        and type(count) is int
        and len(sums) == 1 + len(FILES) * count
        and sums.keys() == {RECORD, *_files(count)}
        and all(type(sha) is str for sha in sums.values())
        and sums[RECORD] == own_checksum(record)
    )


def _are_histories(amaxes: Any) -> bool:
    """Three rows of sizes for each layer."""
    if type(amaxes) is not dict:
        return False
    rows = [row for history in amaxes.values() if type(history) is list for row in history]
    sizes = [size for row in rows if type(row) is list for size in row]
    return (
        len(rows) == 3 * len(amaxes)
        and len(sizes) == HISTORY * len(rows)
        and all(type(row) is list and len(row) == HISTORY for row in rows)
        and all(type(history) is list and len(history) == 3 for history in amaxes.values())
        and all(type(size) is float and 0 <= size < math.inf for size in sizes)
    )


def own_checksum(record: dict[str, Any]) -> str:
    """Of the record without its own checksum; floats are written by repr, so they come back."""
    others = {name: sha for name, sha in record["sha256"].items() if name != RECORD}
    return hashlib.sha256(json.dumps(record | {"sha256": others}).encode()).hexdigest()


def _files(count: int) -> list[str]:
    """Those of all shards."""
    return [name for shard in range(count) for name in shards.file_names(shard, count).values()]


def unusable(file: Path | str, why: str) -> UserError:
    return UserError(f"{file}: {why}; use another checkpoint")
