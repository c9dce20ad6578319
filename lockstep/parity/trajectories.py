"""The rungs that look at whole runs: loss curves, fast against strict, handed over half-way."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lockstep import checkpoint
from lockstep.parity.case import Case
from lockstep.parity.compare import changed
from lockstep.parity.envelope import ORDER_SEEDS, WEIGHT_SEEDS, compare, nudged, reordered
from lockstep.parity.side import Side, Steps
from lockstep.parity.tolerances import CURVE, CURVE_NORM, ENVELOPE_CAP
from lockstep.parity.verdict import Finding, Verdict, nothing, within
from lockstep.twin import TrainState

# Long enough for what fast numerics do only to long sequences, such as blocks of causal attention.
LONG = 128


def curves(case: Case) -> list[Finding]:
    """Two whole runs from the same weights on the same batches.

    Only float64 has dropout here: reordered, a row would get another mask.
    """
    ours, theirs = (whole_run(side, case) for side in case.sides)
    return held(case, case.a, ours, theirs, "across")


def fast(case: Case) -> list[Finding]:
    """Fast numerics stay in the strict ones' noise. Without dropout: fast draws other masks.

    They round elsewhere, so the noise is that of the compute dtype's own rounding.
    """
    same = {"dropout": 0.0, "accum": 1, "remat": "none", "context": LONG}
    strict = case.changed(numerics="strict", **same)
    found = []
    for side in case.sides:
        ours = whole_run(side, strict)
        theirs = whole_run(side, strict.changed(numerics="fast"))
        found += held(strict, side, ours, theirs, side.name, dtype=case.compute)
    return found


def checkpoints(case: Case) -> list[Finding]:
    """Stopped half-way, saved, and resumed: in itself bit for bit, in the other as one run."""
    windows = case.windows(case.config.optim.steps)
    half = len(windows) // 2
    found = []
    for first in case.sides:
        unbroken = whole_run(first, case)
        saved = _through_disk(first.steps(case.config, case.perturbed, windows[:half]).end)
        for second in case.sides:
            rest = second.steps(case.config, saved, windows[half:])
            where = f"{first.name} to {second.name}"
            if first is second:
                parted = changed(unbroken.end, rest.end) + [
                    f"step {half + t + 1}"
                    for t in np.flatnonzero(rest.loss != unbroken.loss[half:])
                ]
                found.append(nothing("changed by resuming", where, parted))
            else:
                spliced: dict[str, Any] = {
                    f: np.concatenate([getattr(unbroken, f)[:half], getattr(rest, f)])
                    for f in ("loss", "grad_norm", "loss_scale", "skipped")
                }
                joined = replace(rest, **spliced)
                found += held(case, case.a, unbroken, joined, where)
    return found


def whole_run(side: Side, case: Case) -> Steps:
    return side.steps(case.config, case.perturbed, case.windows(case.config.optim.steps))


def held(
    case: Case, noisy: Side, ours: Steps, theirs: Steps, where: str, dtype: str = "float32"
) -> list[Finding]:
    """Two curves against float64's bound, or against the noise of the side that trained `ours`."""
    if case.exact:
        gap, norm = (np.abs(getattr(ours, f) - getattr(theirs, f)) for f in ("loss", "grad_norm"))
        return [
            within("gap of the losses, in nats", f"{where}, step {gap.argmax() + 1}",
                   float(gap.max()), CURVE.bound),
            within("gap of the gradient norms", f"{where}, step {norm.argmax() + 1}",
                   float(norm.max()), CURVE_NORM.bound),
        ]  # fmt: skip
    runs = perturbed_runs(case, noisy, dtype)
    losses = np.stack([run.loss for run in runs])
    finding = compare(ours.loss, theirs.loss, losses, ENVELOPE_CAP[case.compute]).finding
    found = [replace(finding, where=f"{where}, {finding.where}")]
    if case.config.precision.roles.loss_scaling:
        found.append(scale_traces(where, ours, theirs, runs))
    return found


def perturbed_runs(case: Case, side: Side, dtype: str = "float32") -> list[Steps]:
    """The runs whose spread is the envelope: nudged weights, then reordered batches."""
    windows = case.windows(case.config.optim.steps)
    state = case.perturbed
    weights = (
        replace(state, params=nudged(state.params, seed, dtype)) for seed in range(WEIGHT_SEEDS)
    )
    orders = (
        np.stack([reordered(window, seed) for window in windows]) for seed in range(ORDER_SEEDS)
    )
    return [
        *(side.steps(case.config, start, windows) for start in weights),
        *(side.steps(case.config, state, order) for order in orders),
    ]


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
