"""Rung 8's rule on invented curves whose verdict is known; the ladder has it on the twins."""

from zlib import crc32

import numpy as np
import pytest

from lockstep.judge.envelope import (
    Train,
    compare_curves,
    compare_programs,
    perturbations,
    spread,
)
from lockstep.judge.noise import PLAIN, Perturbation
from lockstep.judge.tolerances import ENVELOPE, FLOOR_ULPS
from lockstep.judge.verdict import Verdict

STEPS = 50
BASE = 5 - np.linspace(0, 2, STEPS)
ENVELOPE_OF_NOISE = np.linspace(0.1, 1, STEPS) * 2e-4
CAP = 5e-3


def program(base: np.ndarray = BASE, noise: float = 1e-4, flip: float = 0.0) -> Train:
    """Random noise on each run; a rounding that flips at step 4 of the plain run alone."""

    def train(perturbation: Perturbation) -> np.ndarray:
        # Not hash(), which differs from process to process.
        seed = [crc32(repr(perturbation).encode()), int(base.sum() * 1e6)]
        drawn = np.random.default_rng(seed).standard_normal(STEPS)
        once = flip * (np.arange(STEPS) > 3) * (perturbation == PLAIN)
        return base + noise * drawn * np.linspace(0.1, 1, STEPS) + once

    return train


def test_a_gap_within_the_noise_is_equal() -> None:
    result = compare_curves(BASE, BASE + ENVELOPE_OF_NOISE, ENVELOPE_OF_NOISE, CAP)
    assert result.finding.verdict is Verdict.EQUAL and result.horizon == STEPS


def test_a_larger_gap_is_different_and_says_where() -> None:
    other = BASE.copy()
    other[30:] += 5e-3
    result = compare_curves(BASE, other, ENVELOPE_OF_NOISE, CAP)
    assert result.finding.verdict is Verdict.DIFFERENT
    assert result.finding.where == "step 31"
    # What it calls allowed is what it judges by.
    assert (result.gap > result.allowed).tolist() == [t >= 30 for t in range(STEPS)]


def test_beyond_the_cap_nothing_is_said() -> None:
    other, wide = BASE.copy(), ENVELOPE_OF_NOISE.copy()
    other[35:] += 0.5
    wide[30:] = 1.0
    result = compare_curves(BASE, other, wide, CAP)
    assert result.horizon == 30
    assert result.finding.verdict is Verdict.EQUAL
    assert "inconclusive from step 31" in result.finding.detail
    nothing = compare_curves(BASE, other, np.ones(STEPS), CAP)
    assert nothing.finding.verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize("counted", [1, 24, 25])
def test_equal_is_said_of_half_of_the_steps_at_least(counted: int) -> None:
    """A difference is one at any step."""
    wide, other = ENVELOPE_OF_NOISE.copy(), BASE.copy()
    wide[counted:], other[0] = 1.0, other[0] + 0.1
    verdict = Verdict.EQUAL if counted >= STEPS / 2 else Verdict.INCONCLUSIVE
    assert compare_curves(BASE, BASE, wide, CAP).finding.verdict is verdict
    assert compare_curves(BASE, other, wide, CAP).finding.verdict is Verdict.DIFFERENT


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_loss_that_is_not_finite_is_never_equal(poison: float) -> None:
    other, wide = BASE.copy(), ENVELOPE_OF_NOISE.copy()
    other[10] = wide[5] = poison
    result = compare_curves(BASE, other, ENVELOPE_OF_NOISE, CAP)
    assert result.finding.verdict is Verdict.DIFFERENT
    assert compare_curves(BASE, BASE, wide, CAP).horizon == 5


def test_two_ulps_are_forgiven_where_nothing_else_is() -> None:
    ulp, still = float(np.spacing(np.float32(BASE[0]))), np.zeros(STEPS)
    most = int(FLOOR_ULPS * ENVELOPE.bound)
    for ulps, verdict in ((most, Verdict.EQUAL), (most + 1, Verdict.DIFFERENT)):
        other = BASE.copy()
        other[0] += ulps * ulp
        assert compare_curves(BASE, other, still, CAP).finding.verdict is verdict


def test_exchanging_the_operands_changes_nothing() -> None:
    """Where one program's noise is a hundred times the other's, too."""
    loud, quiet = program(noise=1e-4), program(BASE + 3e-5, noise=1e-6)
    one = compare_programs(loud, quiet, (loud, quiet), CAP).finding
    other = compare_programs(quiet, loud, (quiet, loud), CAP).finding
    assert one == other and one.verdict is Verdict.EQUAL, str(one)
    alone = compare_programs(loud, quiet, (quiet,), CAP).finding
    assert alone.verdict is Verdict.DIFFERENT  # of one side's envelope alone the verdict is another


def test_different_is_the_median_of_three_starts() -> None:
    once = compare_programs(program(), program(flip=2e-3), (program(),), CAP).finding
    assert once.verdict is Verdict.EQUAL
    assert "the median of three starts: " in once.detail
    always = compare_programs(program(), program(BASE + 2e-3), (program(),), CAP).finding
    assert always.verdict is Verdict.DIFFERENT


def test_an_equal_pair_is_not_started_again() -> None:
    asked = []

    def counted(perturbation: Perturbation) -> np.ndarray:
        asked.append(perturbation)
        return program()(perturbation)

    compare_programs(counted, program(), (program(),), CAP)
    assert asked == [PLAIN]


def test_one_run_is_no_envelope() -> None:
    with pytest.raises(AssertionError, match="no envelope"):
        spread(program(), perturbations()[:1])
