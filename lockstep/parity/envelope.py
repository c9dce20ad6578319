"""The noise envelope: how far a correct program parts from itself.

Two correct programs round differently, and training amplifies it. By how much can be measured in
ONE framework: move every initial weight by one ulp of float32, or permute the rows of each batch,
and train again. The gap between two frameworks is then held against that.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from lockstep.model.params import Arrays
from lockstep.parity.tolerances import ENVELOPE, LAG, LOSS_ULPS
from lockstep.parity.verdict import Finding, Verdict

WEIGHT_SEEDS, ORDER_SEEDS = 6, 2
RESTARTS = 2  # from the first two nudged weights
DIGITS = {"bfloat16": 7, "float16": 10}  # explicit bits of the mantissa


def nudged(weights: Arrays, seed: int, dtype: str = "float32") -> Arrays:
    """Every float32 weight moved by one ulp, up or down by a coin.

    With a half-precision `dtype`: rounded to it, up or down at random, the nearer the likelier.
    """
    generator = np.random.Generator(np.random.Philox(key=[seed, 1]))

    def nudge(w: np.ndarray) -> np.ndarray:
        coin = generator.random(w.shape)
        if dtype == "float32":
            return np.nextafter(w, np.where(coin < 0.5, -np.inf, np.inf), dtype=np.float32)
        ulp = np.spacing(np.abs(w)) * 2.0 ** (23 - DIGITS[dtype])
        return (w + (coin - 0.5) * ulp).astype(dtype).astype(np.float32)

    return {name: nudge(w) for name, w in weights.items()}


def reordered(window: np.ndarray, seed: int) -> np.ndarray:
    """The rows of each micro-batch of (N, B, T+1) in another order."""
    generator = np.random.Generator(np.random.Philox(key=[seed, 2]))
    return np.stack([batch[generator.permutation(len(batch))] for batch in window])


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All (steps,), from step 1."""

    gap: np.ndarray  # running maximum of |difference of the two losses|
    envelope: np.ndarray  # the widest running maximum among the perturbed runs
    allowed: np.ndarray  # the smallest gap that would be called different
    horizon: int  # steps that count: the envelope is still below its cap
    finding: Finding


def compare(
    ours: np.ndarray,
    theirs: np.ndarray,
    perturbed: np.ndarray,
    cap: float,
    *,
    plain: np.ndarray | None = None,
) -> Comparison:
    """Rung 8's rule: max over t of M(t) / (env(t + 5) + 2 ulp(L)) <= 3, up to the horizon.

    Args:
        ours: losses (steps,) of one framework, unperturbed.
        theirs: losses (steps,) of the other.
        perturbed: losses (runs, steps) of perturbed runs of one program.
        cap: the width of the envelope, in nats, beyond which this configuration tells nothing.
        plain: losses (steps,) of that program unperturbed; ours, where it is that one.
    """
    plain = ours if plain is None else plain
    assert len(perturbed) >= 2, "one run is no envelope: gaps vary many-fold between seeds"
    gap = np.maximum.accumulate(np.abs(ours - theirs))
    envelope = np.maximum.accumulate(np.abs(perturbed - plain), axis=1).max(axis=0)
    # A running maximum as the gap is: or a gap of one early step would fail when the loss, and with
    # it the ulp, has fallen.
    ulp = np.maximum.accumulate(np.spacing(np.abs(ours).astype(np.float32)).astype(np.float64))
    # A rounding that flips in all of them flips some steps earlier in one than in another.
    ahead = envelope[np.minimum(np.arange(len(ours)) + LAG, len(ours) - 1)]
    noise = np.fmax(envelope, np.fmin(ahead, cap)) + LOSS_ULPS * ulp
    beyond = np.flatnonzero(~(envelope <= cap))
    horizon = int(beyond[0]) if len(beyond) else len(ours)
    return Comparison(
        gap=gap,
        envelope=envelope,
        allowed=ENVELOPE.bound * noise,
        horizon=horizon,
        finding=_judge(gap / noise, horizon, cap),
    )


def confirmed(finding: Finding, restarted: Callable[[int], Finding]) -> Finding:
    """A gap that is called different must be so at the median of three starts.

    One rounding that flips in the one program, and in none of the perturbed runs of the other, can
    be wider than the envelope. It does not do so again from other weights; a bug does.

    Args:
        restarted: the finding of two runs that both start from the k-th nudged weights.
    """
    if finding.verdict is not Verdict.DIFFERENT:
        return finding
    three = [finding, *(restarted(k) for k in range(RESTARTS))]
    middle = sorted(three, key=lambda each: each.figure)[1]
    figures = ", ".join(f"{each.figure:.3g}" for each in three)
    return replace(middle, detail=f"{middle.detail}; the median of three starts: {figures}")


def _judge(ratio: np.ndarray, horizon: int, cap: float) -> Finding:
    if horizon == 0:
        return Finding(
            rule="envelope",
            where="step 1",
            figure=np.inf,
            bound=cap,
            verdict=Verdict.INCONCLUSIVE,
            detail="the envelope is too wide at once",
        )
    counted = np.where(np.isnan(ratio[:horizon]), np.inf, ratio[:horizon])
    worst = int(counted.argmax())
    held = bool(counted[worst] <= ENVELOPE.bound)
    whole = (
        f"held over all {horizon} steps"
        if horizon == len(ratio)
        else (f"inconclusive from step {horizon + 1}: the envelope is wider than {cap:g} nats")
    )
    return Finding(
        rule="gap over envelope",
        where=f"step {worst + 1}",
        figure=float(counted[worst]),
        bound=ENVELOPE.bound,
        verdict=Verdict.EQUAL if held else Verdict.DIFFERENT,
        detail=whole,
    )
