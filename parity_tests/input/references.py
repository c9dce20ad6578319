"""A recorded reference of `lockstep check`, and a mapping: what fuzzing tries on them."""

import hashlib
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from lockstep.check import trace
from lockstep.check.command import _read_map
from lockstep.check.mapping import propose
from lockstep.check.modules import Calls, make_pairing
from lockstep.check.port import aliases_of, tensors_of
from lockstep.check.rungs import Bounds, labels_of
from lockstep.check.tensors import Tensors
from lockstep_recorder import wire
from lockstep_recorder.main import write as write_trace
from parity_tests.input.mutations import Files, damage, files

TRACE = {
    "program": "a.py", "framework": "torch", "versions": {"torch": "2"}, "device": "cpu",
    "precision": "float32", "narrow": ["x"], "widened": False, "modules": {"a": "Linear"},
    "kinds": {"a": "Linear"}, "settings": {"a": {"bias": True}}, "parameters": ["a.weight"],
    "tied": [["a.weight", "b.weight"]], "loss": 1.5, "events": ["+a", "-a"], "repeats": True,
    "initial": {"a.weight": {"mean": 0.0, "std": 1.0, "kurtosis": 3.0, "shape": [2, 3]}},
    "batch": {"dict": {"x": {"array": "x", "dtype": "int64"}}}, "lacks": {}, "seed": 0,
    "constants": [], "rounded": ["float32 of shape (3,)"], "accumulated": [1.5],
    "losses": [1.5], "envelope": [0.0], "noise": {"loss": 0.1, "act/a": 0.2},
}  # fmt: skip
TRACED = {
    "weights/0/a.weight": (2, 3), "grad/a.weight": (2, 3), "batch/0/x": (4,), "act/a": (4, 2),
    "in/a": (4, 3), "dact/a": (4, 2), "fed/1/0/weights/a.weight": (2, 3),
    "fed/1/0/grad/a.weight": (2, 3), "fed/1/1/weights/a.weight": (2, 3), "sum/a.weight": (2, 3),
}  # fmt: skip
ARRAYS = {name: np.ones(shape) for name, shape in TRACED.items()}


def traces() -> st.SearchStrategy[Files]:
    body = b"".join(wire.chunks(ARRAYS))
    about = {"format": 1, "sha256": hashlib.sha256(body).hexdigest(), **TRACE}
    bodies = st.just(body) | damage(body)
    return st.builds(
        lambda text, body: {trace.ABOUT: text, trace.ARRAYS: body}, files(about), bodies
    )


def read_trace(folder: Path) -> trace.Trace:
    """Also as a check does, which looks into everything but the numbers."""
    read = trace.read(folder)
    about = read.about
    calls = Calls(about["events"], about["kinds"], read.arrays, aliases_of(about["tied"]))
    calls.before(set(calls.names)), calls.parents()
    side = tensors_of(about, read.weights, about["events"], about["kinds"])
    propose(side, side)
    make_pairing({name: name for name in calls.names}, calls, calls).forced(calls)
    labels_of(read)
    bounds = Bounds(read)
    assert bounds.of("act/a", "act/a") > 0
    return read


def same_trace(read: trace.Trace, folder: Path) -> bool:
    write_trace(str(folder / "given" / "again"), read.about, read.arrays)
    again = trace.read(folder / "given" / "again")  # its arrays may stand in another order
    return {**again.about, "sha256": ""} == {**read.about, "sha256": ""}


def read_map(folder: Path) -> int:
    content = _read_map(folder / "map.json")
    side = Tensors(
        {"a.weight": (2, 3), "a.bias": (3,)}, {}, ["a.weight", "a.bias"], "torch", {"a.weight"}
    )
    return len(propose(side, side, content).entries)


MAP = {
    "tensors": [
        {"port": {"name": "a.weight"}, "reference": {"name": "a.weight"}, "axes": [0, 1]},
        {"port": {"name": "a.bias", "cuts": [[0, 0, 2, False]]},
         "reference": {"name": "a.bias", "cuts": [[0, 1, 3, False]]}},
        {"port": {"name": "a.bias", "cuts": [[0, 2, 3, True]]},
         "reference": {"name": "a.bias", "cuts": [[0, 0, 1, True]]}},
    ],
    "modules": {"a": "a"},
}  # fmt: skip
