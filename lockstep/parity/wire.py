"""Packs states and batches for messages between comparisons and a framework's process."""

from typing import Any

import numpy as np

from lockstep.data.batch import Batch
from lockstep.model.params import Arrays
from lockstep.model.state import COUNTERS, TENSORS, TrainState
from lockstep_recorder.wire import group


def pack(state: TrainState) -> tuple[dict[str, Any], Arrays]:
    arrays = {f"{f}/{name}": x for f in TENSORS for name, x in getattr(state, f).items()}
    return {name: getattr(state, name) for name in COUNTERS}, arrays


def unpack(counters: dict[str, Any], arrays: Arrays) -> TrainState:
    fields: dict[str, Any] = {field: group(arrays, field) for field in TENSORS}
    return TrainState(**fields, **{name: counters[name] for name in COUNTERS})


def pack_input(given: Batch | np.ndarray) -> Arrays:
    """Packs a question's input: an array is named input, the arrays of a batch input/FIELD."""
    if isinstance(given, Batch):
        return {f"input/{f}": x for f, x in given._asdict().items() if x is not None}
    return {"input": given}


def unpack_input(arrays: Arrays) -> Any:
    """Unpacks the `Batch` or the array that `pack_input` packed."""
    return arrays["input"] if "input" in arrays else Batch(**group(arrays, "input"))
