"""What passes between the instruments and a framework's process: a line of JSON, then tensors."""

import json
from typing import Any

import numpy as np
from safetensors import numpy as safetensors

from lockstep.data.batch import Batch
from lockstep.model.params import Arrays
from lockstep.model.state import TrainState

COUNTERS = ("step", "updates", "loss_scale", "good_steps")
ARRAYS = ("params", "mu", "nu", "amaxes")


def send(stream: Any, header: dict[str, Any], arrays: Arrays) -> None:
    body = safetensors.save({name: _plain(x) for name, x in arrays.items()})
    names = {"names": list(arrays), "body": len(body)}  # safetensors sorts; the order is kept here
    stream.write(json.dumps(header | names).encode() + b"\n" + body)
    stream.flush()


def receive(stream: Any) -> tuple[dict[str, Any], Arrays] | None:
    """None where the other side has closed."""
    line = stream.readline()
    if not line:
        return None
    header = json.loads(line)
    body = stream.read(header["body"])
    if len(body) < header["body"]:
        return None
    arrays = safetensors.load(body)
    return header, {name: arrays[name] for name in header["names"]}


def _plain(x: np.ndarray) -> np.ndarray:
    """bfloat16 as float32, which holds it exactly: safetensors cannot read it back from memory."""
    return np.array(x, np.float32 if x.dtype.name == "bfloat16" else None, order="C")


def pack(state: TrainState) -> tuple[dict[str, Any], Arrays]:
    arrays = {f"{f}/{name}": x for f in ARRAYS for name, x in getattr(state, f).items()}
    return {name: getattr(state, name) for name in COUNTERS}, arrays


def unpack(counters: dict[str, Any], arrays: Arrays) -> TrainState:
    fields: dict[str, Any] = {field: group(arrays, field) for field in ARRAYS}
    return TrainState(**fields, **{name: counters[name] for name in COUNTERS})


def pack_input(given: Batch | np.ndarray) -> Arrays:
    """What a question is about: an array is named input, the arrays of a batch input/FIELD."""
    if isinstance(given, Batch):
        return {f"input/{f}": x for f, x in given._asdict().items() if x is not None}
    return {"input": given}


def unpack_input(arrays: Arrays) -> Any:
    """The `Batch` or the array that `pack_input` was given."""
    return arrays["input"] if "input" in arrays else Batch(**group(arrays, "input"))


def group(arrays: Arrays, prefix: str) -> Arrays:
    """The arrays named PREFIX/NAME, by NAME."""
    start = prefix + "/"
    return {name.removeprefix(start): x for name, x in arrays.items() if name.startswith(start)}
