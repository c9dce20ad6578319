"""Rungs 8 to 11 judge a whole run beside its losses, here on invented runs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lockstep.config.policy import POLICIES, resolve
from lockstep.judge.compare import compare_ends
from lockstep.judge.envelope import noise_dtype, perturbations
from lockstep.judge.noise import PLAIN, Perturbation
from lockstep.judge.tolerances import epsilon
from lockstep.judge.verdict import Verdict
from lockstep.model.params import Arrays
from lockstep.model.state import TrainState
from lockstep.parity import matrix, trajectories
from lockstep.parity.automaton import find_strays
from lockstep.parity.case import Case
from lockstep.parity.pair import GPT
from lockstep.parity.side import Steps
from lockstep.run import checkpoint
from lockstep.train.schedule import learning_rates

STEPS, NOISE = 12, 1e-4
CONFIG = matrix.config({"policy": "fp16", "steps": STEPS, "n_layer": 1}, "cpu")
SKIPPED = np.arange(STEPS) < 3
Train = Callable[[Perturbation], Steps]


def state(weights: np.ndarray, **counters: Any) -> TrainState:
    tensors = {"w": weights.astype(np.float32)}
    known = {"step": 0, "updates": 0, "good_steps": 0} | counters
    return TrainState(params=tensors, mu=tensors, nu=tensors, **known)


START = state(np.ones(64), loss_scale=2.0**20)


def program(change: Callable[[Steps], Steps] = lambda run: run) -> Train:
    """A run that skips three steps; what is perturbed moves norms and weights by some 1e-4, or more
    where it is perturbed by more than an ulp of float32."""

    def train(perturbation: Perturbation) -> Steps:
        noise = NOISE * epsilon(perturbation.dtype) / epsilon("float32")
        seed = [perturbation.weights or 0, perturbation.rows or 0, perturbation != PLAIN]
        random = np.random.default_rng(seed)
        made = np.maximum(np.arange(STEPS) - 3, 0)
        scale = 2.0 ** np.maximum(20 - np.arange(STEPS), 17)
        end = state(1 + noise * random.standard_normal(64), step=STEPS, updates=STEPS - 3,
                    loss_scale=2.0**17, good_steps=STEPS - 3)  # fmt: skip
        return change(Steps(
            loss=5 - np.linspace(0, 1, STEPS) + 1e-6 * random.standard_normal(STEPS),
            grad_norm=np.where(SKIPPED, np.nan, 2 + noise * random.standard_normal(STEPS)),
            lr=learning_rates(CONFIG.optim)[made], loss_scale=scale, skipped=SKIPPED, end=end,
            about={},
        ))  # fmt: skip

    return train


def verdicts(other: Train) -> set[str]:
    """The rules that call the other program different from the sound one."""
    sides: Any = (None, None)
    case = Case(pair=GPT, a=sides[0], b=sides[1], config=CONFIG)
    vars(case)["perturbed"] = START
    found = trajectories.compare_runs(case, program(), other, (program(), program()), "here")
    assert Verdict.INCONCLUSIVE not in {finding.verdict for finding in found}
    return {finding.rule for finding in found if finding.verdict is Verdict.DIFFERENT}


def with_end(**changed: Any) -> Callable[[Steps], Steps]:
    return lambda run: replace(run, end=replace(run.end, **changed))


def moved(run: Steps) -> Steps:
    weights: Arrays = {"w": run.end.params["w"] + np.float32(10 * NOISE)}
    return replace(run, end=replace(run.end, params=weights))


def without_a_number(run: Steps) -> Steps:
    return replace(run, end=replace(run.end, nu={"w": run.end.nu["w"] * np.float32(np.nan)}))


ASKED: list[tuple[Callable[[Steps], Steps], str]] = [
        (lambda run: run, ""),
        (moved, "gap over noise, at the end"),
        (without_a_number, "gap over noise, at the end"),
        (lambda run: replace(run, grad_norm=run.grad_norm * 1.01), trajectories.NORMS_RULE),
        (lambda run: replace(run, lr=run.lr * (1 + 1e-15)), "learning rates not the table's"),
        (lambda run: replace(run, lr=np.roll(run.lr, -1)), "learning rates not the table's"),
        (lambda run: replace(run, loss_scale=run.loss_scale * 2),
         "loss scales not the automaton's loss scales part before the program parts from itself"),
        (with_end(updates=STEPS), "counters"),
        (with_end(step=STEPS - 3), "counters"),
        (with_end(good_steps=0), "counters"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "rule"), ASKED)
def test_what_a_run_is_asked(change: Callable[[Steps], Steps], rule: str) -> None:
    found = verdicts(program(change))
    assert bool(found) == bool(rule) and all(each in rule for each in found)


@pytest.mark.parametrize("policy", POLICIES)
def test_noise_is_coarse_for_narrow_formats_alone(policy: str) -> None:
    narrow = policy.startswith("fp8")
    assert noise_dtype([resolve(policy)]) == ("bfloat16" if narrow else "float32")


class Counting:
    """Stands for a side: each step adds one to both moments, and reports the second."""

    def steps(self, config: Any, given: TrainState, windows: Any) -> Steps:
        count = len(windows.tokens)
        mu, nu = ({"w": moment["w"] + np.float32(count)} for moment in (given.mu, given.nu))
        end = replace(given, mu=mu, nu=nu, step=given.step + count)
        curve = given.nu["w"][0] + np.arange(count)
        return Steps(loss=curve, grad_norm=curve, lr=curve, loss_scale=curve, skipped=curve > 99,
                     end=end, about={})  # fmt: skip


@pytest.mark.parametrize("field", ["params", "mu", "nu", "step", "good_steps"])
def test_a_resume_goes_through_the_disk(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The resumed run shows what a checkpoint loses."""
    side: Any = Counting()
    case = Case(pair=GPT, a=side, b=side, config=CONFIG)
    vars(case)["perturbed"] = replace(START, good_steps=3)
    runs = (trajectories.train_program, lambda *given: trajectories.resume_program(side, *given))
    whole, joined = (make(side, case)(PLAIN) for make in runs)
    assert trajectories.find_changes(whole, joined) == []
    load = checkpoint.load
    lost: Any = {"w": np.zeros(64, np.float32)} if field in ("params", "mu", "nu") else 0
    monkeypatch.setattr(checkpoint, "load", lambda path: replace(load(path), **{field: lost}))
    assert trajectories.find_changes(whole, runs[1](side, case)(PLAIN))


def test_a_bug_in_one_perturbed_run_is_no_difference() -> None:
    """The end is judged at the median of three starts."""
    runs = perturbations()

    def end(perturbation: Perturbation) -> Arrays:
        shift = 1.0 * (perturbation == PLAIN)
        return {"w": program()(perturbation).end.params["w"] + np.float32(shift)}

    def sound(perturbation: Perturbation) -> Arrays:
        return {"w": program()(perturbation).end.params["w"]}

    (found,) = compare_ends(end, sound, [sound], runs, runs[:2])
    assert found.verdict is Verdict.EQUAL and "median of three starts" in found.detail


def test_a_resume_is_the_same_in_all_that_it_reports() -> None:
    run = program()(PLAIN)
    assert trajectories.find_changes(run, run) == []
    for name in trajectories.REPORTED:
        values = getattr(run, name).copy()
        values[7] = not values[7] if name == "skipped" else values[7] * (1 + 1e-15)
        found = trajectories.find_changes(run, replace(run, **{name: values}))
        assert found == [f"{name} of step 8"]
    for name in trajectories.COUNTERS:
        assert trajectories.find_changes(run, with_end(**{name: 0})(run)) == [name]


def test_strays_are_counted_from_any_start() -> None:
    late = state(np.ones(4), step=STEPS - 1, updates=STEPS - 3, loss_scale=2.0**20)
    rates = learning_rates(CONFIG.optim)[[STEPS - 3, STEPS - 2]]
    end = state(np.ones(4), step=STEPS + 1, updates=STEPS - 1, loss_scale=2.0**20, good_steps=2)
    none = np.zeros(2, bool)
    run = Steps(loss=none, grad_norm=none, lr=rates, loss_scale=np.full(2, 2.0**20), skipped=none,
                end=end, about={})  # fmt: skip
    assert not any(find_strays(CONFIG, late, run).values())
    by_steps = learning_rates(CONFIG.optim)[[STEPS - 1, STEPS - 1]]
    assert find_strays(CONFIG, late, replace(run, lr=by_steps))["learning rates not the table's"]
