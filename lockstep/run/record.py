"""A checkpoint's state.json: counters, a description of tensors, checksums."""

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

FORMAT = 4  # another one where FIELDS change, or what their values mean
FILES = {  # the files of tensors, by the field of the state
    "params": "weights.safetensors",
    "mu": "mu.safetensors",
    "nu": "nu.safetensors",
}
RECORD = "state.json"
RECORD_LIMIT = 2_000_000  # bytes
FIELDS: dict[str, type] = {
    "format": int, "step": int, "updates": int, "loss_scale": float, "good_steps": int,
    "amaxes": dict, "dtype": str, "names": list, "frozen": list, "sha256": dict,
}  # fmt: skip
MOST = 2**31 - 1  # that a counter can be: both frameworks count in int32


def write_record(folder: Path, state: TrainState, sums: dict[str, str]) -> None:
    """Write state.json, durably.

    Args:
        sums: the SHA-256 of each file of tensors, by its name.
    """
    dtypes = {array.dtype.name for array in state.params.values()}
    assert len(dtypes) == 1, f"one param dtype expected, not {dtypes}"
    frozen = sorted(state.params.keys() - state.mu.keys())
    record: dict[str, Any] = {"format": FORMAT}
    record |= {name: getattr(state, name) for name in COUNTERS}
    record |= {"amaxes": {name: history.tolist() for name, history in state.amaxes.items()}}
    record |= {"dtype": dtypes.pop(), "names": [*state.params], "frozen": frozen, "sha256": sums}
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
    if type(number) is int and number > 0 and number != FORMAT:
        problem = f"format {number}, this version reads {FORMAT}"
        remedy = "upgrade Lockstep" if number > FORMAT else "use the commit that config.json names"
        raise UserError(f"{file}: {problem}; {remedy} or use another checkpoint")
    if not (type(number) is int and number == FORMAT and _is_valid(record)):
        raise unusable(file, "damaged or not a Lockstep checkpoint")
    return record


def _is_valid(record: dict[str, Any]) -> bool:
    """Says if each field has its type and its range."""
    if record.keys() != FIELDS.keys():
        return False
    if any(type(record[name]) is not kind for name, kind in FIELDS.items()):
        return False
    names, sums = record["names"], record["sha256"]
    return (
        all(0 <= record[name] <= MOST for name in ("step", "updates", "good_steps"))
        and record["loss_scale"] >= 0  # it has no floor: too low, it becomes 0
        and all(map(_is_history, record["amaxes"].values()))
        and record["dtype"] in stream.DTYPES.values()
        and all(type(name) is str for name in (*names, *record["frozen"], *sums.values()))
        and len(names) == len(set(names)) > 0
        and set(record["frozen"]) < set(names)
        and sums.keys() == {*FILES.values()}
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
