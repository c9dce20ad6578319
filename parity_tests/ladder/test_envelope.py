"""The instruments on made-up curves whose verdict is known, then on the twins."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.model.state import initial_state
from lockstep.parity import curves, operands
from lockstep.parity.compare import error_ratios, norm_gap, norm_rule, ratio_rule, worst
from lockstep.parity.envelope import compare, confirmed, nudged, reordered
from lockstep.parity.tolerances import ENVELOPE_CAP, RATIO
from lockstep.parity.verdict import Finding, Verdict
from parity_tests.pair import perturbed as perturbed_state
from parity_tests.pair import run, start, toy

STEPS = 50
GENERATOR = np.random.default_rng(0)
BASE = 5 - np.linspace(0, 2, STEPS)


def noisy(scale: float) -> np.ndarray:
    return BASE + scale * GENERATOR.standard_normal(STEPS) * np.linspace(0.1, 1, STEPS)


NOISE = np.stack([noisy(1e-4) for _ in range(8)])


def test_noise_of_the_same_size_is_equal() -> None:
    result = compare(BASE, noisy(1e-4), NOISE, cap=5e-3)
    assert result.finding.verdict is Verdict.EQUAL
    assert result.horizon == STEPS


def test_a_larger_gap_is_different_and_says_where() -> None:
    other = BASE.copy()
    other[30:] += 5e-3
    result = compare(BASE, other, NOISE, cap=5e-3)
    assert result.finding.verdict is Verdict.DIFFERENT
    assert result.finding.where == "step 31"
    # What it calls allowed is what it judges by.
    assert (result.gap > result.allowed).tolist() == [t >= 30 for t in range(STEPS)]


def test_beyond_the_cap_nothing_is_said() -> None:
    wide = NOISE.copy()
    wide[0, 20] += 1.0
    other = BASE.copy()
    other[25:] += 0.5
    result = compare(BASE, other, wide, cap=5e-3)
    assert result.horizon == 20
    assert result.finding.verdict is Verdict.EQUAL
    assert "inconclusive from step 21" in result.finding.detail
    wide[0, 0] += 1.0
    assert compare(BASE, other, wide, cap=5e-3).finding.verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_loss_that_is_not_finite_is_never_equal(poison: float) -> None:
    other = BASE.copy()
    other[10] = poison
    assert compare(BASE, other, NOISE, cap=5e-3).finding.verdict is Verdict.DIFFERENT
    sick = NOISE.copy()
    sick[3, 5] = poison
    assert compare(BASE, BASE, sick, cap=5e-3).horizon == 5


def test_two_ulps_are_forgiven_where_nothing_else_is() -> None:
    ulp = float(np.spacing(np.float32(BASE[0])))
    still = np.stack([BASE] * 8)
    for ulps, verdict in ((6, Verdict.EQUAL), (7, Verdict.DIFFERENT)):
        other = BASE.copy()
        other[0] += ulps * ulp
        assert compare(BASE, other, still, cap=5e-3).finding.verdict is verdict


def flipped(at: int, size: float) -> np.ndarray:
    """A rounding that flips once, for good."""
    other = noisy(1e-4)
    other[at:] += size
    return other


def findings(*others: np.ndarray) -> tuple[Finding, Callable[[int], Finding]]:
    first, *rest = (compare(BASE, other, NOISE, cap=5e-3).finding for other in others)
    return first, rest.__getitem__


def test_different_is_what_is_so_from_other_weights_too() -> None:
    flip, same = flipped(3, 2e-3), noisy(1e-4)
    once, _ = findings(flip)
    assert once.verdict is Verdict.DIFFERENT
    result = confirmed(*findings(flip, same, same))
    assert result.verdict is Verdict.EQUAL
    assert f"the median of three starts: {once.figure:.3g}, " in result.detail
    assert confirmed(*findings(flip, same, flip)).verdict is Verdict.DIFFERENT
    assert confirmed(*findings(flip, flip, flip)).verdict is Verdict.DIFFERENT


def test_what_is_equal_at_once_is_not_tried_again() -> None:
    finding, _ = findings(noisy(1e-4))

    def never(k: int) -> Finding:
        raise AssertionError

    assert confirmed(finding, never) is finding


def test_the_envelope_is_that_of_the_noisy_program_around_itself() -> None:
    """Around another program it would be as wide as the gap, and hide it."""
    wrong = BASE + 0.1
    assert compare(wrong, BASE, NOISE, cap=5e-1).finding.verdict is Verdict.EQUAL
    right = compare(wrong, BASE, NOISE, cap=5e-1, plain=BASE)
    assert right.finding.verdict is Verdict.DIFFERENT


def test_one_run_is_no_envelope() -> None:
    with pytest.raises(AssertionError):
        compare(BASE, BASE, NOISE[:1], cap=5e-3)


def test_perturbations_are_one_ulp_and_a_permutation() -> None:
    weights = initial_state(toy()).params
    moved = nudged(weights, 0)
    for name, weight in weights.items():
        ulps = np.abs(moved[name].view(np.int32).astype(np.int64) - weight.view(np.int32))
        assert moved[name].dtype == np.float32
        assert (ulps[weight != 0] == 1).all()
    assert any((nudged(weights, 1)[name] != moved[name]).any() for name in weights)
    window = np.arange(2 * 8 * 3).reshape(2, 8, 3)
    shuffled = reordered(window, 0)
    assert (np.sort(shuffled, axis=1) == window).all()
    assert (shuffled != window).any()


def test_norm_rule() -> None:
    a = {"x": np.ones(4), "y": np.zeros(3)}
    assert all(f.verdict is Verdict.EQUAL for f in norm_rule(a, a))
    moved = norm_rule({**a, "x": a["x"] + [0, 0, 0, 1e-9]}, a)
    assert [f.verdict for f in moved] == [Verdict.DIFFERENT, Verdict.EQUAL]
    assert norm_rule({**a, "y": a["y"] + 1e-30}, a)[1].verdict is Verdict.DIFFERENT
    assert norm_rule({**a, "x": a["x"] * np.nan}, a)[0].verdict is Verdict.DIFFERENT
    assert norm_gap(np.array([1.0, 1e-3]), np.array([1.0, 0.0])) == pytest.approx(1e-3)


def test_error_ratios() -> None:
    """Two batches, of which one has errors a thousand times larger."""
    size = np.array([1.0, 1000.0])
    truth = {"x": np.ones((64, 2)), "exact": np.ones((64, 2)), "small": np.ones((4, 2))}
    near = {**truth, "x": truth["x"] + 1e-6 * size}
    far = {**truth, "x": truth["x"] - 4e-6 * size, "exact": truth["exact"] + 1e-9}
    assert error_ratios(far, near, truth) == pytest.approx({"x": 4.0, "exact": np.inf})
    assert error_ratios(near, near, truth) == {"x": 1.0, "exact": 1.0}
    mixed = {**truth, "x": truth["x"] + 1e-6 * size * [4, 1]}
    assert error_ratios(mixed, near, truth)["x"] == pytest.approx(2.0)


def test_ratio_rule() -> None:
    truth = {f"t{i}": np.zeros((64, 1)) for i in range(5)}
    ones = {name: x + 1 for name, x in truth.items()}
    inside, outside = (RATIO["bfloat16"].bound + off for off in (-0.01, 0.01))
    verdicts = {
        factor: worst(
            ratio_rule(truth, {**ones, "t0": ones["t0"] * factor}, ones, compute="bfloat16")
        ).verdict
        for factor in (1.0, inside, 1 / inside, outside, 1 / outside, 0.0, np.nan)
    }
    assert [v is Verdict.EQUAL for v in verdicts.values()] == [True] * 3 + [False] * 4
    shifted = {name: x * 1.1 for name, x in ones.items()}  # each within its bound, not the median
    found = [f for f in ratio_rule(truth, shifted, ones, compute="bfloat16")]
    assert [f.rule for f in found if f.verdict is Verdict.DIFFERENT] == ["median error ratio"]


def test_what_is_float32_under_every_policy_has_its_bound() -> None:
    truth = {"x": np.ones((64, 1))}
    for error, bound in ((1e-7, RATIO["float32"]), (1e-4, RATIO["bfloat16"])):
        near, far = ({"x": truth["x"] * (1 + error * k)} for k in (1, 2))
        found, _ = ratio_rule(truth, far, near, compute="bfloat16")
        assert (found.figure, found.bound) == (pytest.approx(2.0, rel=1e-3), bound.bound)


def curve(framework: str, config: Config, seed: int | None = None) -> np.ndarray:
    state = perturbed_state(config)
    if seed is not None:
        state = replace(state, params=nudged(state.params, seed))
    return np.array([result.loss for result in run(start(framework, config, state), config)])


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_the_twins_against_their_noise(policy: str) -> None:
    """Equal as they are; different when one of them has another beta2."""
    config = toy(policy=policy, n_layer=2, accum=2, steps=60, lr=1e-3)
    ours = curve("torch", config)
    noise = np.stack([curve("torch", config, seed) for seed in range(4)])
    cap = ENVELOPE_CAP[config.precision.roles.compute]
    healthy = compare(ours, curve("jax", config), noise, cap)
    assert healthy.finding.verdict is Verdict.EQUAL
    assert healthy.horizon == 60
    sick = replace(config, optim=replace(config.optim, beta2=0.9))
    assert compare(ours, curve("jax", sick), noise, cap).finding.verdict is Verdict.DIFFERENT


def test_curves_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = {"device": "cpu", "steps": 5, "n_layer": 1, "d_model": 16, "dropout": 0.1}
    assert curves.run("jax:fp64", "torch:fp64", flags, tmp_path) is Verdict.EQUAL
    printed = capsys.readouterr().out
    assert "float64, all 5 steps" in printed
    assert {path.name for path in tmp_path.iterdir()} == {"curves.json", "curves.png"}


def test_a_bug_beside_its_healthy_self(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = {"device": "cpu", "steps": 3, "n_layer": 1, "d_model": 16}
    verdict = curves.run("torch:fp64", "jax:fp64", flags, tmp_path, "softmax-scale=0.5")
    assert verdict is Verdict.DIFFERENT
    printed = capsys.readouterr().out
    assert "the rung that catches it is 2 activations" in printed
    assert "different from step 1 on\nlast loss: torch:fp64 " in printed
    content = json.loads((tmp_path / "curves.json").read_text())
    healthy, sick, other = (content[side]["loss"][0] for side in ("a", "sick", "b"))
    assert np.allclose(healthy, other, rtol=0, atol=1e-12)
    assert content["compared"] == ["sick", "b"] and not np.allclose(sick, other, rtol=0, atol=1e-9)


def test_a_bug_in_the_side_whose_noise_is_taken(tmp_path: Path) -> None:
    """It must not widen the envelope that it is held against."""
    flags = {"device": "cpu", "steps": 8, "n_layer": 1, "d_model": 16}
    verdict = curves.run("torch:bf16", "jax:bf16", flags, tmp_path, "loss-not-divided")
    assert verdict is Verdict.DIFFERENT


def test_where_two_curves_part_is_the_first_step_beyond_what_is_allowed() -> None:
    ours = np.linspace(3.0, 2.0, 20)
    theirs = ours + np.where(np.arange(20) < 6, 0.0, 1e-3)
    noise = ours + 1e-5 * np.array([[1.0], [-1.0]])
    said = curves.seen(compare(ours, theirs, noise, 1.0), {"A": [3.0, 2.5], "B": [2.0]})
    assert said == ["different from step 7 on", "last loss: A 2.5000, B 2.0000"]
    same = curves.seen(compare(ours, ours, noise, 1.0), {"A": [2.0]})
    assert same == ["last loss: A 2.0000"]


def test_a_bug_needs_an_operand_of_its_framework(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--bug erf-gelu: is a bug of torch"):
        curves.run("jax:fp64", "jax:bf16", {}, tmp_path, "erf-gelu")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("jax", "has no policy"),
        ("jax:bf17", "--policy bf17"),
        ("torch:bf16:slow", "option slow is unknown"),
        ("tensorflow:bf16", "neither a run nor"),
    ],
)
def test_operands_that_are_none(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        operands.parse(text, {})


def test_other_data_or_models_are_not_compared() -> None:
    a = operands.parse("jax:bf16", {})
    for flags in ({"n_layer": 2}, {"seed": 1}, {"data": "other.txt"}):
        with pytest.raises(UserError, match="not one experiment"):
            operands.comparable(a, operands.parse("torch:bf16", flags))
