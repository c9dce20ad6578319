"""Rung 7: GradScaler's decisions, one per step."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from lockstep.config import Config
from lockstep.data.batch import Batch
from lockstep.judge.compare import changed_tensors
from lockstep.judge.verdict import Finding, empty
from lockstep.model.state import TrainState
from lockstep.parity.case import Case
from lockstep.parity.side import Side, Steps
from lockstep.train.schedule import learning_rates

STEPS = 24


@dataclass
class Automaton:
    """GradScaler's transition, in plain Python."""

    scale: float
    factor: float
    interval: int
    good_steps: int = 0

    def step(self, finite: bool) -> None:
        if not finite:
            self.scale, self.good_steps = float(np.float32(self.scale / self.factor)), 0
            return
        self.good_steps += 1
        if self.good_steps == self.interval:
            with np.errstate(over="ignore"):
                grown = float(np.float32(self.scale) * np.float32(self.factor))
            self.scale, self.good_steps = grown if np.isfinite(grown) else self.scale, 0


def find_strays(config: Config, start: TrainState, run: Steps) -> dict[str, list[str]]:
    """Finds values of a run that do not follow from its start and its skipped steps.

    Returns: a rule -> the steps, or the counters at the end, that break it.
    """
    made = start.updates + np.cumsum(~run.skipped)  # updates after each step
    count, precision = len(run.skipped), config.precision
    automaton = Automaton(start.loss_scale, precision.loss_scale_factor,
                          precision.loss_scale_interval, start.good_steps)  # fmt: skip
    scales = []
    for skipped in run.skipped:
        scales.append(automaton.scale)
        if precision.roles.loss_scaling:
            automaton.step(finite=not skipped)
    ends = {"step": start.step + count, "updates": int(made[-1]), "loss_scale": automaton.scale,
            "good_steps": automaton.good_steps}  # fmt: skip
    steps = {
        "learning rates not the table's":
            run.lr != learning_rates(config.optim)[made - ~run.skipped],
        "loss scales not the automaton's": run.loss_scale != np.array(scales),
    }  # fmt: skip
    found = {rule: [f"step {t + 1}" for t in np.flatnonzero(off)] for rule, off in steps.items()}
    return found | {"counters": [name for name, end in ends.items()
                                 if getattr(run.end, name) != end]}  # fmt: skip


def loss_scale(case: Case) -> Iterator[Finding]:
    """Injects overflows in chosen micro-batches; compares scales, skips, rates and counts."""
    overflowing = case.pair.overflowing
    assert overflowing, "this pair has no way to overflow"
    # From 2 it soon falls below 1, where jmp's own floor is and GradScaler has none.
    case = case.replace(loss_scale_init=2.0, loss_scale_interval=3)
    config = case.config
    chosen = choose(STEPS, config.optim.accum, case.seed)
    config, state, windows = overflowing(config, case.windows(STEPS), chosen)
    overflows = np.asarray(chosen.any(1))
    for side in case.sides:
        seen = side.steps(config, state, windows)
        wrong = {
            "skipped steps": seen.skipped != overflows,
            "finite gradient norms": np.isfinite(seen.grad_norm) == overflows,
        }
        for what, steps in wrong.items():
            off = [f"step {t + 1}" for t in np.flatnonzero(steps)]
            yield empty(f"{what} not the automaton's", side.name, off)
        for rule, strays in find_strays(config, state, seen).items():
            yield empty(rule, side.name, strays)
        lone = side.steps(config, state, windows.select(np.flatnonzero(overflows)[:1]))
        yield empty("moved by a skipped step", side.name, changed_tensors(state, lone.end))
    yield from _lone_overflows(case.replace(tied=False))


def _lone_overflows(case: Case) -> Iterator[Finding]:
    """Injects an overflow into one tensor's gradient; the step must be skipped."""
    window = case.windows(1)
    start = case.pair.initial(case.config)
    scale = largest_scale(case.a, case.config, start, window) / 4  # a margin for the other side
    for weight, state in case.pair.magnified(replace(start, loss_scale=scale)).items():
        if not case.config.dtypes.at(weight.rpartition(".")[0]).loss_scaling:
            continue  # of a format of its own, in which it does not overflow
        for side in case.sides:
            seen = side.steps(case.config, state, window)
            moved = changed_tensors(state, seen.end) if seen.skipped.all() else ["not skipped"]
            yield empty(f"moved by an overflow in {weight} alone", side.name, moved)


def largest_scale(side: Side, config: Config, state: TrainState, window: Batch) -> float:
    """Finds the largest power of two under which a step is not skipped."""
    repeated = window.select(np.zeros(STEPS, int))
    seen = side.steps(config, replace(state, loss_scale=2.0**30), repeated)
    return float(seen.loss_scale[np.argmin(seen.skipped)])


def choose(steps: int, accum: int, seed: int) -> np.ndarray:
    """Chooses micro-batches, bool (S, N), so that about a third of the steps overflow."""
    generator = np.random.Generator(np.random.Philox(key=[seed, 4]))
    chosen = generator.random((steps, accum)) < 1 - (2 / 3) ** (1 / accum)
    chosen[2] = [False] * (accum - 1) + [True]  # one at least, and not in the first micro-batch
    return chosen
