"""The judge's figures, by hand: what a gap is of, and that no weight of a start hides a bug."""

from typing import Any

import numpy as np
import pytest

from lockstep.check import accept
from lockstep.check.roots.locate import Root, group_updates
from lockstep.check.rungs import Spot
from lockstep.judge import compare
from lockstep.judge.verdict import Verdict
from lockstep.model.state import initial_state
from lockstep.monitor import history
from lockstep.parity import case
from lockstep.parity.pair import GPT
from parity_tests.pair import toy


def test_norm_gap() -> None:
    """Checks that the largest tells of one element of a million, the root of squares of all; each
    is relative to the second, and infinite where nothing can be compared."""
    many, alone = np.ones(10**6), np.ones(10**6)
    alone[7] += 1e-3
    assert compare.norm_gap(alone, many) == pytest.approx(1e-3)
    one = np.full(101, 0.1)
    one[0] = 10.0
    assert compare.norm_gap(one + np.r_[0, np.full(100, 0.1)], one) == pytest.approx(
        1 / np.sqrt(101)
    )
    assert compare.norm_gap(np.array([3.0]), np.array([2.0])) == pytest.approx(0.5)
    assert compare.norm_gap(np.zeros(2), np.zeros(2)) == 0
    for a, b in (([0.0, 1], [0.0]), ([np.nan], [1.0]), ([1.0], [0.0]), ([np.inf], [1.0])):
        assert compare.norm_gap(np.array(a), np.array(b)) == np.inf


def test_starts_are_perturbed() -> None:
    """No gain of a start is one and no bias zero, whatever the seed; another seed has others."""
    config = toy("gpt2", n_layer=1)
    fresh = initial_state(config).params
    nobody: Any = None
    first, second = (
        case.Case(pair=GPT, a=nobody, b=nobody, config=config, seed=seed) for seed in (0, 1)
    )
    for name, x in first.perturbed.params.items():
        assert (x != second.perturbed.params[name]).mean() > 0.99, name
        if x.ndim == 1:
            assert np.abs(x - fresh[name]).std() > 0.005, name


def make_spot(place: str, figure: float, where: str) -> Spot:
    return Spot(rule="update", where=where, figure=figure, bound=1e-12, detail=place, rung="4i",
                verdict=Verdict.DIFFERENT)  # fmt: skip


UPDATES = ("a", 5e-7), ("a", 0.3), ("a", 2e-7), ("b", 1e-7)  # of four steps
OUTPUTS = {"blocks.0.mlp": 0.1, "blocks.1.mlp": 0.02}
# What is accepted of a root -> whether all of it is.
OF_UPDATES = {"optimizer=1e-6": False, "optimizer=0.29": False, "optimizer=0.3": True}
OF_OUTPUTS = {
    "blocks.*.mlp=0.02": False, "blocks.*.mlp=0.1": True, "blocks.0.mlp=0.1": False,
    "blocks.0.mlp=0.1 blocks.1.mlp=0.02": True, "blocks.0.mlp=0.02 blocks.1.mlp=0.1": False,
    "blocks.*.mlp=scale": False, "blocks.*.mlp=scale blocks.*.mlp=shift": True,
}  # fmt: skip


def test_accepted_roots() -> None:
    """A place is accepted by the largest of its differences or by all of its causes, and a root by
    all of its places."""
    steps = [make_spot(name, size, f"{name}, step {i}") for i, (name, size) in enumerate(UPDATES)]
    (updates,) = group_updates(steps)
    spots = [make_spot("", size, name) for name, size in OUTPUTS.items()]
    outputs = Root("2i", "blocks.*.mlp", "forward", spots, [*OUTPUTS], spots[0],
                   cause="scale; shift")  # fmt: skip
    for root, cases in ((updates, OF_UPDATES), (outputs, OF_OUTPUTS)):
        found = {text: accept.is_accepted(root, accept.parse(text.split())) for text in cases}
        assert found == cases


def test_parting_of_logs() -> None:
    """Where two logs part is a step, also of logs that do not begin with the first."""
    steps = np.array([100, 102, 103, 107])
    parting = history.Parting(steps=steps, ours=np.ones(4), theirs=np.array([1, 1, 1.5, np.nan]))
    assert [parting.first_beyond(nats) for nats in (0.0, 0.6)] == [103, 107]
    lines = history.describe_parting(parting)
    assert lines[0] == "their losses differ from step 103 on, of 4 that both have"
    assert lines[-2] == "  by more than 0.1 nats: from step 103 on"
