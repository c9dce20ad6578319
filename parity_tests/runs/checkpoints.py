"""States to save, and what is asked of a checkpoint after that."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.errors import UserError
from lockstep.files.stream import checksum
from lockstep.model.params import Arrays
from lockstep.model.state import TrainState
from lockstep.run.checkpoint import load
from lockstep.run.record import FILES, RECORD

DTYPES: dict[str, Any] = {
    "float64": np.uint64,
    "float32": np.uint32,
    "bfloat16": np.uint16,
    "float16": np.uint16,
}


def arrays(seed: int, dtype: str = "float32") -> Arrays:
    """Every layout that a bridge may hand over, with random bits: NaNs and subnormals too."""
    integers = np.random.Generator(np.random.Philox(seed)).integers
    unsigned = DTYPES[dtype]

    def random(*shape: int) -> np.ndarray:
        bits = integers(0, np.iinfo(unsigned).max, shape, unsigned, endpoint=True)
        return np.asarray(bits).view(dtype)

    return {
        "plain": random(3, 5),
        "transposed": random(4, 3).T,
        "permuted": random(2, 3, 4).transpose(2, 0, 1),
        "strided": random(8)[::2],
        "scalar": random(),
    }


def state(step: int = 1000, dtype: str = "float32") -> TrainState:
    return TrainState(
        params=arrays(3 * step, dtype),
        mu=arrays(3 * step + 1, dtype),
        nu=arrays(3 * step + 2, dtype),
        step=step,
        updates=max(step - 7, 0),
        loss_scale=0.1 + 2.0**-20,
        good_steps=42,
    )


def assert_same(a: TrainState, b: TrainState) -> None:
    for field in FILES:
        ours, theirs = getattr(a, field), getattr(b, field)
        assert list(ours) == list(theirs)  # the order, too: a sum over tensors depends on it
        for name in ours:
            x, y = ours[name], theirs[name]
            assert (x.dtype, x.shape) == (y.dtype, y.shape), name
            assert x.tobytes() == y.tobytes(), name  # tobytes walks any layout in C order
    counters = [replace(s, params={}, mu={}, nu={}) for s in (a, b)]
    assert counters[0] == counters[1]
    assert [type(c.loss_scale) for c in counters] == [float, float]


def rewrite(path: Path, change: Callable[[dict], None] = lambda record: None) -> None:
    """Changes state.json as another program might, with valid checksums of the other files."""
    record = json.loads((path / RECORD).read_text())
    record["sha256"] = {name: checksum(path / name) for name in FILES.values()}
    change(record)
    (path / RECORD).write_text(json.dumps(record))


def hidden(run: Path) -> list[str]:
    return [path.name for path in (run / "checkpoints").glob(".*")]


def refusal(path: Path) -> str:
    """The line that a user reads, without the folder of this test."""
    with pytest.raises(UserError) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(f"{path}/", "")


def silent(line: str) -> None:
    raise AssertionError(line)
