"""Compares whole runs of one of our twins and of a peer, each in a separate process."""

from collections.abc import Iterator

import numpy as np
import pytest

from lockstep.judge.compare import norm_gap
from lockstep.judge.noise import PLAIN
from lockstep.judge.verdict import Verdict
from lockstep.model.params import shapes
from lockstep.parity import ladder
from lockstep.parity.case import Case
from lockstep.parity.side import Side, Steps
from lockstep.parity.trajectories import train_program

CURVES = ladder.RUNGS[7]

# Relative gap of weights and moments after a run in float64. Seen: nanogpt 0 and bare-jax 2.1e-13
# after 20 steps; after 24, Hugging Face's 2.1e-13 in qkv.bias, whose keys' part has a gradient of
# rounding alone, which Adam makes large, and 5e-14 elsewhere.
END = 1e-11

Sides = dict[str, Side]


@pytest.fixture(scope="module")
def sides(request: pytest.FixtureRequest) -> Iterator[Sides]:
    """Opens both sides of the pair that a test file calls PAIR."""
    modules = request.module.PAIR.modules
    sides = {name: Side(name, module, small=True) for name, module in modules.items()}
    yield sides
    for side in sides.values():
        side.close()


def equal_runs(case: Case) -> tuple[Steps, Steps]:
    """The two whole runs, which the curves' rung calls equal."""
    outcome = ladder.climb(CURVES, case)
    assert outcome.verdict is Verdict.EQUAL, str(outcome.worst)
    ours, theirs = (train_program(side, case)(PLAIN) for side in case.sides)
    assert np.array_equal(ours.lr, theirs.lr)  # the same bytes of one table
    return ours, theirs


def assert_same_end(case: Case, ours: Steps, theirs: Steps) -> None:
    """Asserts equal counters and names; in float64 equal weights and moments, to rounding."""
    assert (theirs.end.step, theirs.end.updates) == (ours.end.step, ours.end.updates)
    for field in ("params", "mu", "nu"):
        a, b = (getattr(side.end, field) for side in (ours, theirs))
        assert list(a) == list(b) == list(shapes(case.config.model))
        if case.exact:
            assert max(norm_gap(a[name], b[name]) for name in a) <= END
