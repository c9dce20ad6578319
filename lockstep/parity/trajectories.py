"""The rungs that look at whole runs: loss curves, fast against strict, handed over half-way."""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.model.state import TrainState
from lockstep.parity.case import Case
from lockstep.parity.compare import changed
from lockstep.parity.envelope import (
    ORDER_SEEDS,
    WEIGHT_SEEDS,
    compare,
    confirmed,
    nudged,
    reordered,
)
from lockstep.parity.side import Side, Steps
from lockstep.parity.tolerances import CURVE, CURVE_NORM, ENVELOPE_CAP
from lockstep.parity.verdict import Finding, Verdict, nothing, within
from lockstep.run import checkpoint

Pair = tuple[Steps, Steps]

# Long enough for what fast numerics do only to long sequences, such as blocks of causal attention.
LONG = 128


def curves(case: Case) -> list[Finding]:
    """Two whole runs from the same weights on the same batches.

    Only float64 has dropout here: reordered, a row would get another mask.
    """

    def pair(start: TrainState) -> Pair:
        a, b = (whole_run(side, case, start) for side in case.sides)
        return a, b

    return held(case, case.a, pair, "across")


def fast(case: Case) -> list[Finding]:
    """Fast numerics stay in the strict ones' noise. Without dropout: fast draws other masks.

    They round elsewhere, so the noise is that of the compute dtype's own rounding.
    """
    same = {"dropout": 0.0, "accum": 1, "remat": "none", "context": LONG}
    strict = case.changed(numerics="strict", **same)
    found = []
    for side in case.sides:

        def pair(start: TrainState, side: Side = side) -> Pair:
            loose = strict.changed(numerics="fast")
            return whole_run(side, strict, start), whole_run(side, loose, start)

        found += held(strict, side, pair, side.name, dtype=case.compute)
    return found


def checkpoints(case: Case) -> list[Finding]:
    """Stopped half-way, saved, and resumed: in itself bit for bit, in the other as one run."""
    found = []
    for first in case.sides:
        for second in case.sides:
            where = f"{first.name} to {second.name}"

            def pair(start: TrainState, first: Side = first, second: Side = second) -> Pair:
                return whole_run(first, case, start), handed_over(first, second, case, start)

            if first is second:
                unbroken, joined = pair(case.perturbed)
                steps = np.flatnonzero(joined.loss != unbroken.loss) + 1
                parted = changed(unbroken.end, joined.end) + [f"step {t}" for t in steps]
                found.append(nothing("changed by resuming", where, parted))
            else:
                found += held(case, case.a, pair, where)
    return found


def whole_run(side: Side, case: Case, start: TrainState) -> Steps:
    return side.steps(case.config, start, case.windows(case.config.optim.steps))


def handed_over(first: Side, second: Side, case: Case, start: TrainState) -> Steps:
    """A whole run whose second half is another's."""
    windows = case.windows(case.config.optim.steps)
    half = len(windows) // 2
    begun = first.steps(case.config, start, windows[:half])
    rest = second.steps(case.config, _through_disk(begun.end), windows[half:])
    joined: dict[str, Any] = {
        f: np.concatenate([getattr(begun, f), getattr(rest, f)])
        for f in ("loss", "grad_norm", "loss_scale", "skipped")
    }
    return replace(rest, **joined)


def held(
    case: Case,
    noisy: Side,
    pair: Callable[[TrainState], Pair],
    where: str,
    dtype: str = "float32",
) -> list[Finding]:
    """Two curves against float64's bound, or against the noise of one side.

    Args:
        pair: trains both from a state.
    """
    ours, theirs = pair(case.perturbed)
    if case.exact:
        gap, norm = (np.abs(getattr(ours, f) - getattr(theirs, f)) for f in ("loss", "grad_norm"))
        return [
            within("gap of the losses, in nats", f"{where}, step {gap.argmax() + 1}",
                   float(gap.max()), CURVE.bound),
            within("gap of the gradient norms", f"{where}, step {norm.argmax() + 1}",
                   float(norm.max()), CURVE_NORM.bound),
        ]  # fmt: skip
    starts, runs = perturbed_runs(case, noisy, dtype)
    losses, cap = np.stack([run.loss for run in runs]), ENVELOPE_CAP[case.compute]
    plain = whole_run(noisy, case, case.perturbed).loss

    def restarted(k: int) -> Finding:
        a, b = pair(starts[k])
        others = np.stack([plain, *np.delete(losses, k, axis=0)])
        return compare(a.loss, b.loss, others, cap, plain=losses[k]).finding

    finding = compare(ours.loss, theirs.loss, losses, cap, plain=plain).finding
    finding = confirmed(finding, restarted)
    found = [replace(finding, where=f"{where}, {finding.where}")]
    if case.config.precision.roles.loss_scaling:
        found.append(scale_traces(where, ours, theirs, runs))
    return found


def perturbed_runs(
    case: Case, side: Side, dtype: str = "float32"
) -> tuple[list[TrainState], list[Steps]]:
    """The runs whose spread is the envelope: nudged weights, then reordered batches.

    And the states that the former start from.
    """
    windows = case.windows(case.config.optim.steps)
    state = case.perturbed
    starts = [
        replace(state, params=nudged(state.params, seed, dtype)) for seed in range(WEIGHT_SEEDS)
    ]
    orders = (
        np.stack([reordered(window, seed) for window in windows]) for seed in range(ORDER_SEEDS)
    )
    runs = [
        *(side.steps(case.config, start, windows) for start in starts),
        *(side.steps(case.config, state, order) for order in orders),
    ]
    return starts, runs


def scale_traces(where: str, ours: Steps, theirs: Steps, noise: list[Steps]) -> Finding:
    """Scales and skips may part no earlier than those of two runs of one program do."""
    own = min(_parting(ours, run) for run in noise)
    across = _parting(ours, theirs)
    verdict = Verdict.EQUAL if across >= own else Verdict.DIFFERENT
    return Finding(
        rule="loss scales part before the program parts from itself",
        where=f"{where}, step {across}",
        figure=float(own - across) if verdict is Verdict.DIFFERENT else 0.0,
        bound=0.0,
        verdict=verdict,
    )


def _parting(a: Steps, b: Steps) -> int:
    """The first step, from 1, whose scale or skip differs; one past the last where none does."""
    parted = np.flatnonzero((a.loss_scale != b.loss_scale) | (a.skipped != b.skipped))
    return int(parted[0]) + 1 if len(parted) else len(a.loss) + 1


def _through_disk(state: TrainState) -> TrainState:
    with tempfile.TemporaryDirectory() as folder:
        return checkpoint.load(checkpoint.save(Path(folder), state, keep=1))
