"""The rules on tensors: float64's norms, and below it the noise of the programs themselves."""

import re

import ml_dtypes
import numpy as np
import pytest

from lockstep.data.batch import Batch
from lockstep.judge.compare import (
    compare_measures,
    noise_rule,
    norm_gap,
    norm_rule,
)
from lockstep.judge.noise import (
    TENSOR_RUNS,
    Measure,
    nudge_weights,
    permute_rows,
    relative_gaps,
)
from lockstep.judge.tolerances import FLOOR, NOISE, NORM, SENSITIVITY, epsilon
from lockstep.judge.verdict import Outcome, Verdict
from lockstep.model.params import Arrays
from lockstep.model.state import TrainState, initial_state
from parity_tests.pair import perturbed, toy

STATE = perturbed(toy())
WEIGHT = "blocks.0.mlp.up.weight"


def test_perturbations_are_one_ulp_and_a_permutation() -> None:
    weights = initial_state(toy()).params
    moved = nudge_weights(weights, 0)
    for name, weight in weights.items():
        ulps = np.abs(moved[name].view(np.int32).astype(np.int64) - weight.view(np.int32))
        assert moved[name].dtype == np.float32
        assert (ulps[weight != 0] == 1).all()
    assert any((nudge_weights(weights, 1)[name] != moved[name]).any() for name in weights)
    numbers = np.arange(2 * 8 * 3).reshape(2, 8, 3)
    shuffled = permute_rows(Batch(numbers, -numbers), 0)
    assert (np.sort(shuffled.tokens, axis=1) == numbers).all()
    assert (shuffled.tokens != numbers).any()
    assert (shuffled.targets == -shuffled.tokens).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_nudge_in_half_precision_rounds_up_or_down(dtype: str) -> None:
    weight = STATE.params[WEIGHT]
    moved = nudge_weights({"w": weight}, 0, dtype)["w"]
    assert (moved.astype(dtype).astype(np.float32) == moved).all()
    subnormal = float(ml_dtypes.finfo(dtype).smallest_subnormal)
    assert (np.abs(moved - weight) <= epsilon(dtype) * np.abs(weight) + subnormal).all()
    assert (moved > weight).any() and (moved < weight).any()


def test_a_nudge_in_tf32_rounds_up_or_down() -> None:
    weight = STATE.params[WEIGHT]
    moved = nudge_weights({"w": weight}, 0, "tf32")["w"]
    assert not (moved.view(np.int32) & (2**13 - 1)).any()
    assert (np.abs(moved - weight) <= epsilon("tf32") * np.abs(weight)).all()
    assert (moved > weight).any() and (moved < weight).any()


def test_norm_rule() -> None:
    a = {"x": np.ones(4), "y": np.zeros(3)}
    assert all(f.verdict is Verdict.EQUAL for f in norm_rule(a, a))
    moved = norm_rule({**a, "x": a["x"] + [0, 0, 0, 1e-9]}, a)
    assert [f.verdict for f in moved] == [Verdict.DIFFERENT, Verdict.EQUAL]
    assert norm_rule({**a, "y": a["y"] + 1e-30}, a)[1].verdict is Verdict.DIFFERENT
    assert norm_rule({**a, "x": a["x"] * np.nan}, a)[0].verdict is Verdict.DIFFERENT
    assert norm_gap(np.array([1.0, 1e-3]), np.array([1.0, 0.0])) == pytest.approx(1e-3)


def test_relative_gaps_are_by_batch_and_symmetric() -> None:
    a, b = np.ones((8, 2)), np.ones((8, 2)) * [1.0, 1.25]
    assert relative_gaps(a, b) == pytest.approx([0, 0.2])
    assert (relative_gaps(a, b) == relative_gaps(b, a)).all()
    assert (relative_gaps(0 * a, 0 * a) == 0).all()


def findings(gap: float, noise: tuple[float, float]) -> list[Verdict]:
    """Judges tensors of 64 elements over 3 batches; gap and noise are in units of the floor."""
    a = {name: np.ones((64, 3)) for name in "xy"}
    b = {**a, "x": a["x"] * (1 - gap * FLOOR)}
    ours, theirs = ({name: np.full(3, n * FLOOR) for name in a} for n in noise)
    return [f.verdict for f in noise_rule(a, b, (ours, theirs))]


def test_a_gap_is_held_against_the_larger_noise() -> None:
    inside, outside = NOISE.bound * 4 * 0.99, NOISE.bound * 4 * 1.01
    for noise in ((3.0, 2.5), (2.5, 3.0)):  # and the floor itself: 4
        assert findings(inside, noise) == [Verdict.EQUAL] * 3
        assert findings(outside, noise)[0] is Verdict.DIFFERENT
    assert findings(np.nan, (3.0, 3.0))[0] is Verdict.DIFFERENT
    assert findings(0.0, (np.inf, 3.0))[-1] is Verdict.DIFFERENT


def test_a_program_cannot_hide_its_gap_in_its_own_noise() -> None:
    wide = 4 * SENSITIVITY.bound
    for noise in ((3.0, wide), (wide, 3.0)):
        assert findings(1.0, noise) == [Verdict.EQUAL, Verdict.EQUAL, Verdict.DIFFERENT]


def test_a_tensor_of_one_program_is_a_difference() -> None:
    a = {name: np.ones((64, 3)) for name in "xy"}
    less, still = {"x": a["x"]}, {name: np.zeros(3) for name in "xy"}
    for ours, theirs in ((a, less), (less, a)):
        for found in (norm_rule(ours, theirs), noise_rule(ours, theirs, (still, still))):
            assert (found[0].where, found[0].verdict) == ("y", Verdict.DIFFERENT)
            assert all(finding.verdict is Verdict.EQUAL for finding in found[1:])
    assert len(noise_rule({}, a, ({}, still))) == 2


def test_no_batch_speaks_for_all() -> None:
    """A rounding that falls the other way in one of three batches."""
    a = {"x": np.ones((64, 3))}
    b = {"x": a["x"] * [1, 1, 1.01]}
    still = {"x": np.zeros(3)}
    assert Outcome(noise_rule(a, b, (still, still))).worst.verdict is Verdict.EQUAL
    b["x"][:, 1] *= 1.1
    found = Outcome(noise_rule(a, b, (still, still))).worst
    assert found.verdict is Verdict.DIFFERENT


X = np.random.default_rng(0).standard_normal((32, 4, 8)).astype(np.float32)  # (D, rows, batches)


def product(dtype: str, order: int = 1, factor: float = 1.0) -> Measure:
    """A matmul that rounds its operands to a dtype and sums in float32, in one of two orders."""

    def measure(state: TrainState) -> Arrays:
        w = state.params[WEIGHT].astype(dtype).astype(np.float32)
        x = X.astype(dtype).astype(np.float32)
        terms = (w[:, :, None, None] * np.float32(factor) * x)[:, ::order]
        total = np.zeros_like(terms[:, 0])
        for d in range(terms.shape[1]):
            total += terms[:, d]
        return {"y": total.astype(dtype).astype(np.float32)}

    return measure


@pytest.mark.parametrize("compute", ["float32", "bfloat16", "float16"])
def test_another_order_of_sums_is_equal_and_a_wrong_factor_is_not(compute: str) -> None:
    """The factor is off by 30 ulps of the compute dtype; in float64 by one part in 10^9."""
    plain = product(compute)
    for other, verdict in (
        (product(compute, order=-1), Verdict.EQUAL),
        (product(compute, factor=1 + 30 * epsilon(compute)), Verdict.DIFFERENT),
    ):
        found = Outcome([*compare_measures(plain, other, STATE, compute=compute)]).worst
        assert found.verdict is verdict, str(found)
    other = product(compute, factor=1 + 1e-3)
    found = Outcome([*compare_measures(plain, other, STATE, compute="float64")]).worst
    assert found.bound == NORM.bound and found.verdict is Verdict.DIFFERENT


def test_what_is_called_different_must_be_so_from_other_weights() -> None:
    """Other rounding at these weights alone is a fluke; a bug differs from other weights, too."""
    right = product("bfloat16")
    near = STATE.params[WEIGHT]

    def flips(state: TrainState) -> Arrays:
        made, moved = right(state), np.abs(state.params[WEIGHT] - near).max()
        return {name: x * np.float32(1.01 if moved < 1e-6 else 1) for name, x in made.items()}

    found = [*compare_measures(right, flips, STATE, compute="bfloat16")]
    assert Outcome(found).verdict is Verdict.EQUAL
    assert any("the median of three starts" in each.detail for each in found)


def test_two_starts_that_agree_decide() -> None:
    """And the figure is the one that says less."""
    right, wrong, asked = product("bfloat16"), product("bfloat16", factor=1.01), []

    def counted(state: TrainState) -> Arrays:
        asked.append(state)
        return wrong(state)

    found = Outcome([*compare_measures(right, counted, STATE, compute="bfloat16")]).worst
    assert found.verdict is Verdict.DIFFERENT and len(asked) == 2 * (2 + TENSOR_RUNS)
    told = re.search(r"two starts that agree: (\S+), (\S+)$", found.detail)
    assert told and f"{found.figure:.3g}" == min(told.groups(), key=float)


def test_a_narrower_format_is_seen_by_every_wider_one() -> None:
    """bfloat16 inside a float32 program; TF32, with 3 more bits, is 1,000 times float32's ulp."""
    found = compare_measures(product("float32"), product("bfloat16"), STATE, compute="float32")
    assert Outcome([*found]).worst.figure > 1000
