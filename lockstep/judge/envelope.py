"""Rung 8's rule: compares two loss curves by the noise envelope of their programs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lockstep.config.policy import Roles
from lockstep.judge.noise import PLAIN, Perturbation
from lockstep.judge.tolerances import CURVE, ENVELOPE, FLOOR_ULPS, LAG, LEAST_SHARE
from lockstep.judge.verdict import Finding, Verdict, median_finding

NUDGED = 5  # runs from nudged weights
PERMUTED = 1  # runs on permuted rows
RESTARTS = 2  # from the first nudged weights: with the plain start three


Train = Callable[[Perturbation], np.ndarray]  # the losses (steps,) of a run; remembered


def noise_dtype(kinds: Sequence[Roles], dtype: str = "float32") -> str:
    """Chooses the dtype by whose ulps weights are nudged for the noise of some policies' curves.

    The numbers of a narrow format fall the other way seldom, and by much (up to 1e-3 nats): of runs
    an ulp of float32 apart some meet none in all their steps; of runs one of bfloat16 apart all do
    at once.
    """
    return "bfloat16" if any(roles.recipe for roles in kinds) else dtype


def perturbations(dtype: str = "float32") -> list[Perturbation]:
    """Lists the perturbed runs whose spread is the envelope."""
    nudged = [Perturbation(weights=seed, dtype=dtype) for seed in range(NUDGED)]
    return [*nudged, *(Perturbation(rows=seed) for seed in range(PERMUTED))]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A comparison of two curves; arrays are (steps,), from step 1."""

    gap: np.ndarray  # running maximum of |difference of the two losses|
    envelope: np.ndarray  # the largest running maximum among the perturbed runs
    allowed: np.ndarray  # the smallest gap that would be called different
    horizon: int  # steps that count: the envelope is still below its cap
    finding: Finding


def compare_programs(
    ours: Train,
    theirs: Train,
    noisy: Sequence[Train],
    cap: float,
    dtype: str = "float32",
) -> Comparison:
    """Compares two programs' curves by the larger of their noise envelopes.

    A gap that is called different must be so at the median of three starts. One rounding that flips
    in one program, and in none of the perturbed runs, can be larger than the envelope. It does not
    flip again from other weights; a bug shows again.
    """
    runs = perturbations(dtype)
    envelope = np.max([spread(train, runs) for train in noisy], axis=0)

    def started(perturbation: Perturbation) -> Comparison:
        return compare_curves(ours(perturbation), theirs(perturbation), envelope, cap)

    once = started(PLAIN)
    if once.finding.verdict is not Verdict.DIFFERENT:
        return once
    starts = [once, *map(started, runs[:RESTARTS])]
    return replace(once, finding=median_finding([start.finding for start in starts]))


def spread(train: Train, runs: Sequence[Perturbation]) -> np.ndarray:
    """Computes (steps,): the largest running maximum of a program's gap to itself."""
    plain = train(PLAIN)
    gaps = [np.abs(train(perturbation) - plain) for perturbation in runs]
    assert len(gaps) > 1, "one run is no envelope: gaps vary many-fold between seeds"
    return np.maximum.accumulate(gaps, axis=1).max(axis=0)


def compare_curves(
    ours: np.ndarray, theirs: np.ndarray, envelope: np.ndarray, cap: float, *, exact: bool = False
) -> Comparison:
    """Tests max over t of M(t) / (env(t + 5) + 2 ulp(L)) <= 3, up to the horizon.

    Args:
        ours, theirs: losses (steps,).
        envelope: (steps,), see `spread`.
        cap: the width of the envelope, in nats, beyond which this configuration tells nothing.
        exact: in float64: no step ahead, and for the ulps float64's tolerance.
    """
    gap = np.maximum.accumulate(np.abs(ours - theirs))
    # A running maximum as the gap is: or a gap of one early step would fail when the loss, and with
    # it the ulp, has fallen.
    largest = np.maximum.accumulate(np.fmax(np.abs(ours), np.abs(theirs)))
    ulps = FLOOR_ULPS * np.spacing(largest.astype(np.float32)).astype(np.float64)
    floor = CURVE.bound / ENVELOPE.bound * np.fmax(largest, 1) if exact else ulps
    # A rounding that flips in all of them flips some steps earlier in one than in another.
    ahead = envelope[np.minimum(np.arange(len(ours)) + LAG * (not exact), len(ours) - 1)]
    noise = np.fmax(envelope, np.fmin(ahead, cap)) + floor
    beyond = np.flatnonzero(~(envelope <= cap))
    horizon = int(beyond[0]) if len(beyond) else len(ours)
    return Comparison(
        gap=gap,
        envelope=envelope,
        allowed=ENVELOPE.bound * noise,
        horizon=horizon,
        finding=_judge(gap / noise, horizon, cap),
    )


def _judge(ratio: np.ndarray, horizon: int, cap: float) -> Finding:
    if horizon == 0:
        return Finding(
            rule="envelope", where="step 1", figure=np.inf, bound=cap,
            verdict=Verdict.INCONCLUSIVE, detail="the envelope is too wide at once",
        )  # fmt: skip
    counted = np.where(np.isnan(ratio[:horizon]), np.inf, ratio[:horizon])
    largest = int(np.argmax(counted))
    whole = (
        f"over all {horizon} steps"
        if horizon == len(ratio)
        else f"inconclusive from step {horizon + 1}: the envelope is wider than {cap:g} nats"
    )
    verdict = Verdict.EQUAL if counted[largest] <= ENVELOPE.bound else Verdict.DIFFERENT
    if verdict is Verdict.EQUAL and horizon < LEAST_SHARE * len(ratio):
        verdict = Verdict.INCONCLUSIVE
    return Finding(
        rule="gap over envelope",
        where=f"step {largest + 1}",
        figure=float(counted[largest]),
        bound=ENVELOPE.bound,
        verdict=verdict,
        detail=whole,
    )
