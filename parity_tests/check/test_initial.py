"""Initial values: few elements that are drawn alike are no difference, and a constant is one."""

import math
from typing import Any
from unittest import mock

import numpy as np
import pytest

from lockstep.check.causes.initial import rule_of
from lockstep.check.initial import SIGMAS, compare_initial_values, farthest_moment
from lockstep.check.layout import Cut, Entry, Piece
from lockstep_recorder.recording import moments


def figure(a: np.ndarray, b: np.ndarray) -> float:
    return farthest_moment(*({**moments(x), "size": x.size} for x in (a, b)))[0]


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 30, 64])
@pytest.mark.parametrize("rule", ["normal", "uniform"])
def test_draws_of_one_rule_are_equal(n: int, rule: str) -> None:
    draw = getattr(np.random.default_rng(0), rule)
    pairs = [(draw(size=n), draw(size=n)) for _ in range(2000)]
    assert max(figure(a, b) for a, b in pairs) <= SIGMAS


@pytest.mark.parametrize(
    ("n", "times"), [(2, 1e20), (3, 1e5), (8, 50), (30, 4), (64, 3), (500, 1.5)]
)
def test_another_spread_is_different(n: int, times: float) -> None:
    draw = np.random.default_rng(0).normal
    assert figure(draw(size=n), times * draw(size=n)) > SIGMAS


def test_another_constant_is_different() -> None:
    drawn = np.array([0.3141])
    assert figure(drawn, np.array([0.2718])) == 0  # each may be a draw
    for other in (np.zeros(1), np.ones(1)):
        assert figure(drawn, other) == figure(other, 1 - other) == math.inf
    assert figure(np.zeros(5), np.array([0.1, 0.2, 0.3, 0.1, 0.2])) == math.inf
    assert figure(np.zeros(5), np.zeros(5)) == 0


def test_one_number_that_is_drawn_is_no_constant() -> None:
    zero, drawn = ({**moments(x), "size": 1} for x in (np.zeros(1), np.array([0.2718])))
    assert farthest_moment(zero, drawn)[1] == "0, reference 0.2718"


@pytest.mark.parametrize("times", [1.0, 1.5])
def test_a_kernel_in_another_order_is_compared_whole(times: float) -> None:
    """A kernel of 512 numbers shows a spread that no piece of 32 of them shows."""
    rng, n = np.random.default_rng(0), 16
    arrays = {"theirs": rng.normal(size=(n, 32)), "ours": times * rng.normal(size=(n, 32))}
    pieces = [[Piece(name, (Cut(0, at, at + 1, True),)) for name in arrays] for at in range(n)]
    entries = [Entry(r, p, (32,), (32,), [(0,)]) for r, p in pieces]
    port: Any = mock.Mock()
    port.moments = lambda piece: {**moments(piece.take(arrays)), "size": piece.take(arrays).size}
    about = {"initial": {"theirs": moments(arrays["theirs"])}}
    reference: Any = mock.Mock(about=about)
    (found,) = compare_initial_values(entries, port, reference).findings
    assert found.where == "theirs" and (found.figure > SIGMAS) == (times > 1)


def test_a_rule_is_named_where_numbers_are_enough_to_tell_it() -> None:
    assert rule_of(0.0968, (3,), "torch") == rule_of(0.021, (60,), "torch") == ""
    assert rule_of(0.0201, (64, 64), "torch") == "normal(0.02)"
    assert rule_of(0.0, (3,), "torch") == "a constant"
    assert rule_of(0.285, (10, 1, 12), "jax") == ""  # 1/sqrt(12), or LeCun's 1/sqrt(10)


def test_a_rule_counts_what_a_layer_is_given() -> None:
    """A torch kernel has its outputs in the first axis, a Flax kernel in the last."""
    for shape, framework in (((32, 8), "torch"), ((8, 32), "jax")):
        assert rule_of(0.202, shape, framework) == "torch's uniform 1/sqrt(3 * 8)"
    assert rule_of(0.223, (32, 8), "torch") == "Glorot's sqrt(2/40)"


def test_a_normal_variable_is_not_drawn_by_a_uniform_rule() -> None:
    given = 0.0505, (2, 64, 32), "jax"
    assert rule_of(*given, 1.8) == "torch's uniform 1/sqrt(3 * 128)"
    assert rule_of(*given, 3.0) == ""  # normal(0.05)
