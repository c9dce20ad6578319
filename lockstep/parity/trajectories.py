"""The rungs that compare whole runs: loss curves, fast and strict numerics, resume."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.config import Config
from lockstep.config.autotune import NONE
from lockstep.data.batch import Batch
from lockstep.judge.compare import changed_tensors, compare_ends, norm_rule
from lockstep.judge.envelope import RESTARTS, compare_programs, noise_dtype, perturbations
from lockstep.judge.noise import PLAIN, Perturbation
from lockstep.judge.tolerances import CURVE, CURVE_NORM, END, RUN, RUN_NORM, envelope_cap
from lockstep.judge.verdict import Finding, Verdict, check_bound, empty, locate
from lockstep.model.params import Arrays
from lockstep.model.state import COUNTERS, TrainState
from lockstep.parity.automaton import find_strays
from lockstep.parity.case import Case
from lockstep.parity.matrix import EXACT_STEPS
from lockstep.parity.side import Side, Steps
from lockstep.run import checkpoint

REPORTED = ("loss", "grad_norm", "lr", "loss_scale", "skipped")  # of each step
# From here the first steps of a run under a loss scale overflow, and the later ones do not.
HIGH_SCALE = 2.0**20
# Long enough for what fast numerics do only to long sequences, such as blocks of causal attention.
LONG = 128
# What fast numerics may take on a CPU (`--autotune`), by the dtype of products; a twin leaves out
# what it has not. Under the other policies they take the framework's own ways.
WAYS = {"bfloat16": "attention=blocks,matmul=ynnpack", "float32": "matmul=onednn",
        "float16": "attention=widened,matmul=widened"}  # fmt: skip


def curves(case: Case) -> Iterator[Finding]:
    """Compares two whole runs from the same weights on the same batches.

    Only float64 has dropout here: permuted, a row would get another mask.
    """
    a, b = (train_program(side, case) for side in case.sides)
    yield from compare_runs(case, a, b, (a, b), "across", dtype=case.rounding)


def fast(case: Case) -> Iterator[Finding]:
    """Compares fast numerics with strict ones' noise; no dropout, because fast draws other masks.

    They round elsewhere, so the noise is that of the compute dtype's own rounding, or TF32's. At
    the end tensors count that have a gradient in exact arithmetic: the bias of keys has none, and a
    fused kernel of attention moves it by its own rounding (docs/decisions, record 11).
    """
    same: dict[str, Any] = {"dropout": 0.0, "accum": 1, "remat": "none", "context": LONG}
    same |= {"layers": "unroll", "steps": 12}  # a policy's rows share their answers
    same |= {"n_layer": 3 if case.config.recipes else 2}
    strict = case.replace(numerics="strict", **same)
    ways = WAYS.get(case.config.precision.roles.compute, NONE)
    loose = strict.replace(numerics="fast", autotune=ways)
    noise = "tf32" if case.config.precision.roles.tf32 else case.compute

    def choose_ends(tensors: Arrays) -> Arrays:
        return case.pair.with_truth(strict.config, tensors)

    for side in case.sides:
        slow, quick = (train_program(side, each) for each in (strict, loose))
        yield from compare_runs(
            strict, slow, quick, (slow,), side.name, dtype=noise, choose_ends=choose_ends
        )


def checkpoints(case: Case) -> Iterator[Finding]:
    """Compares a run resumed half-way: by itself bit for bit, by the other within noise."""
    whole = {side.name: train_program(side, case) for side in case.sides}
    noisy = list(whole.values())
    for first in case.sides:
        for second in case.sides:
            where = f"{first.name} to {second.name}"
            resumed = resume_program(first, second, case)
            if first is not second:
                yield from compare_runs(
                    case, whole[first.name], resumed, noisy, where, dtype=case.rounding
                )
                continue
            unbroken, joined = whole[first.name](PLAIN), resumed(PLAIN)
            yield empty("changed by resuming", where, find_changes(unbroken, joined))
    if case.config.precision.roles.loss_scaling:
        yield from resume_after_skips(case)


def resume_after_skips(case: Case) -> Iterator[Finding]:
    """Compares a resumed run whose first steps are skipped, within one program."""
    start = replace(case.perturbed, loss_scale=HIGH_SCALE)
    for side in case.sides:
        unbroken = train_program(side, case, start)(PLAIN)
        joined = resume_program(side, side, case, start)(PLAIN)
        where, half = f"{side.name}, after skipped steps", len(unbroken.skipped) // 2
        yield empty("changed by resuming", where, find_changes(unbroken, joined))
        yield from find_stray_steps(case, where, joined, start)
        shows = unbroken.skipped[:half].any() and not unbroken.skipped[half:].all()
        if not shows:
            yield Finding(
                rule="steps skipped before, and trained after", where=where,
                figure=float(unbroken.skipped.sum()), bound=float(half),
                verdict=Verdict.INCONCLUSIVE,
            )  # fmt: skip


def find_changes(unbroken: Steps, joined: Steps) -> list[str]:
    """Lists differences in any bit: tensors and counters at the end, and the steps' reports."""
    steps = [
        f"{name} of step {t + 1}"
        for name in REPORTED
        for t in np.flatnonzero(
            ~np.isclose(getattr(joined, name), getattr(unbroken, name), 0, 0, equal_nan=True)
        )
    ]
    ends = unbroken.end, joined.end
    counters = [name for name in COUNTERS if len({getattr(end, name) for end in ends}) > 1]
    return changed_tensors(*ends) + counters + steps


def train_program(side: Side, case: Case, start: TrainState | None = None) -> Any:
    windows = case.windows(case.config.optim.steps)
    return train_side(side, case.config, start or case.perturbed, windows)


def train_side(side: Side, config: Config, start: TrainState, windows: Batch) -> Any:
    """Maps a perturbation to the `Steps` of a whole run on windows (S, N, B, T)."""

    def train(perturbation: Perturbation) -> Steps:
        return side.steps(config, perturbation.state(start), perturbation.windows(windows))

    return train


def resume_program(first: Side, second: Side, case: Case, start: TrainState | None = None) -> Any:
    """Makes a whole run whose second half the other program trains."""
    windows = case.windows(case.config.optim.steps)
    half = len(windows.tokens) // 2

    def train(perturbation: Perturbation) -> Steps:
        given = perturbation.windows(windows)
        moved = perturbation.state(start or case.perturbed)
        early, late = given.select(np.s_[:half]), given.select(np.s_[half:])
        begun = first.steps(case.config, moved, early)
        rest = second.steps(case.config, through_disk(begun.end), late)
        joined: dict[str, Any] = {
            f: np.concatenate([getattr(begun, f), getattr(rest, f)]) for f in REPORTED
        }
        return replace(rest, **joined)

    return train


def through_disk(state: TrainState) -> TrainState:
    with tempfile.TemporaryDirectory() as folder:
        return checkpoint.load(checkpoint.save(Path(folder), state, keep=1))


def compare_runs(
    case: Case,
    ours: Any,
    theirs: Any,
    noisy: Sequence[Any],
    where: str,
    dtype: str = "float32",
    choose_ends: Callable[[Arrays], Arrays] = lambda tensors: tensors,
) -> list[Finding]:
    """Compares two programs' runs by float64's tolerance, or by the noise of perturbed runs.

    Losses, gradient norms, and the state at the end. Rates, scales and counters have no noise: they
    follow from which steps were skipped.

    Args:
        choose_ends: returns the tensors of the last state that are compared, below float64.
    """

    def each(read: Callable[[Steps], Any]) -> tuple[Any, Any, list[Any]]:
        """Returns ours, theirs and the noisy with this read of their runs."""

        def reading(train: Any) -> Any:
            return lambda perturbation: read(train(perturbation))

        return reading(ours), reading(theirs), list(map(reading, noisy))

    a, b = ours(PLAIN), theirs(PLAIN)
    strays = [stray for run in (a, b) for stray in find_stray_steps(case, where, run)]
    if case.exact:
        return exact_findings(where, a, b) + strays
    kinds = case.config.precision.all_roles
    cap, nudge = max(map(envelope_cap, kinds)), noise_dtype(kinds, dtype)
    compared = compare_programs(*each(lambda run: run.loss), cap, nudge)
    finding = compared.finding
    found = [replace(finding, where=f"{where}, {finding.where}"), *strays]
    if compared.horizon:
        norms = each(lambda run: read_norms(run, compared.horizon))
        finding = compare_programs(*norms, np.inf, nudge).finding
        found.append(replace(finding, rule=NORMS_RULE, where=f"{where}, {finding.where}"))
    if compared.horizon == len(a.loss):
        moves = perturbations(nudge)
        ends = each(lambda run: choose_ends(run.end.tensors))
        compared_ends = compare_ends(*ends, moves, moves[:RESTARTS])
        found += locate(f"{where}, the end", compared_ends)
    if case.config.precision.roles.loss_scaling:
        noise = [
            (train(PLAIN), train(perturbation))
            for train in noisy
            for perturbation in perturbations(dtype)
        ]
        found.append(compare_scales(where, (ours(PLAIN), theirs(PLAIN)), noise))
    return found


def exact_findings(where: str, a: Steps, b: Steps) -> list[Finding]:
    short = len(a.loss) <= EXACT_STEPS
    loss_bound, norm_bound = (RUN, RUN_NORM) if short else (CURVE, CURVE_NORM)
    loss, norm = (np.abs(getattr(a, f) - getattr(b, f)) for f in ("loss", "grad_norm"))
    return [
        check_bound("gap of the losses, in nats", f"{where}, step {loss.argmax() + 1}",
                float(loss.max()), loss_bound.bound),
        check_bound("gap of the gradient norms", f"{where}, step {norm.argmax() + 1}",
                float(norm.max()), norm_bound.bound),
        *locate(f"{where}, the end", norm_rule(
            a.end.tensors, b.end.tensors, bound=END.bound)),
    ]  # fmt: skip


def find_stray_steps(
    case: Case, where: str, run: Steps, start: TrainState | None = None
) -> list[Finding]:
    strays = find_strays(case.config, start or case.perturbed, run)
    return [empty(rule, where, wrong) for rule, wrong in strays.items()]


NORMS_RULE = "gap over envelope, of gradient norms"


def read_norms(run: Steps, steps: int) -> np.ndarray:
    """Returns the gradient norms of the first steps; 0 for a skipped step."""
    return np.where(run.skipped, 0.0, run.grad_norm)[:steps]


def compare_scales(
    where: str, across: tuple[Steps, Steps], noise: list[tuple[Steps, Steps]]
) -> Finding:
    """Compares scales and skips: they may differ no earlier than two runs of one program do."""
    own, gap = min(parting_step(*runs) for runs in noise), parting_step(*across)
    verdict = Verdict.EQUAL if gap >= own else Verdict.DIFFERENT
    return Finding(
        rule="loss scales part before the program parts from itself",
        where=f"{where}, step {gap}",
        figure=float(max(own - gap, 0)),
        bound=0.0,
        verdict=verdict,
    )


def parting_step(a: Steps, b: Steps) -> int:
    """Finds the first step, from 1, whose scale or skip differs; one past the last if none does."""
    parted = np.flatnonzero((a.loss_scale != b.loss_scale) | (a.skipped != b.skipped))
    return int(parted[0]) + 1 if len(parted) else len(a.loss) + 1
