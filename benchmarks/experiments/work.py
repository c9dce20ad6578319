"""Functions that an arm of an experiment calls.

A run; gradients that half precision flushes to zero; one injected overflow; updates
too small for their weights; long sums.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.experiments.formats import SEEDS
from benchmarks.experiments.frame import Arm
from benchmarks.experiments.sums import sums
from benchmarks.measure import Result
from lockstep import twin
from lockstep.config import Config
from lockstep.data import batches, corpus
from lockstep.data.batch import stack_batches
from lockstep.formats.table import FORMATS, RECIPES
from lockstep.model.params import Arrays
from lockstep.model.state import TrainState, initial_state
from lockstep.parity.pair import GPT
from lockstep.parity.toy import start
from lockstep.twin import BatchTrace, StepResult, Twin

BATCHES, ROWS = 32, 8  # of the held-out loss: the same rows whatever an arm's micro-batch is
LARGEST_SCALE = 2.0**24
PRETRAINING = {"policy": "fp32", "lr": 2e-3, "min_lr": 2e-4}


def held_out(twin: Twin, config: Config) -> float:
    """Mean loss in nats a token on text that no step has seen, under the training policy."""
    return twin.evaluate(
        batches.window(
            corpus.load(config.data.data).val, accum=BATCHES, seed=config.optim.seed, split="val",
            step=0, batch_size=ROWS, context=config.model.context,
        )
    )  # fmt: skip


def train(arm: Arm) -> Result:
    """A run from the seed's weights: what its steps report."""
    built = start(arm.framework, arm.config)
    windows = (GPT.window(arm.config, step) for step in range(arm.steps))
    return report_steps([built.step(built.place(window))() for window in windows])


def report_steps(taken: list[StepResult]) -> Result:
    """Losses, loss scales, and which steps were skipped."""
    return {
        "losses": [result.loss for result in taken],
        "loss_scales": [result.loss_scale for result in taken],
        "skipped_steps": [step for step, result in enumerate(taken) if result.skipped],
        "loss_scale": taken[-1].loss_scale,
    }


def train_seeds(arm: Arm) -> Result:
    """Runs of `SEEDS` seeds, of weights and batches; the held-out loss of each, and the first's
    curve."""
    built, losses, curves = twin.load(arm.framework, arm.config), [], []
    for seed in range(SEEDS):
        config = arm.config.replace(seed=seed)
        built.load(initial_state(config))
        windows = (GPT.window(config, step) for step in range(arm.steps))
        curves.append([built.step(built.place(window))().loss for window in windows])
        losses.append(held_out(built, arm.config))
    return {"validation_losses": losses, "losses": curves[0]}


def train_to_nearest(arm: Arm) -> Result:
    """Trains as `train_seeds` does, but rounds nvfp4's gradients to the nearest number."""
    assert not {"jax_impl.extra.formats.products", "torch_ref.extra.formats.products"} & set(
        sys.modules
    )  # they read it once
    RECIPES["nvfp4"] = replace(RECIPES["nvfp4"], dy=FORMATS["nvfp4"])
    return train_seeds(arm)


def train_on(framework: str, config: Config, state: TrainState, steps: int) -> TrainState:
    """The state after so many steps more."""
    built = start(framework, config, state)
    for step in range(state.step, state.step + steps):
        built.step(built.place(GPT.window(config, step)))()
    return built.state()


def measure_flushed(arm: Arm) -> Result:
    """Measures what is flushed in the initial weights, and after the arm's steps under fp32."""
    config = arm.config
    begun = initial_state(config)
    end = train_on(arm.framework, config.replace(policy="fp32"), begun, arm.steps)
    return {"weights": {"initial": flushed_shares(arm, begun), "trained": flushed_shares(arm, end)}}


def flushed_shares(arm: Arm, state: TrainState) -> Result:
    """Counts the zeros among the gradient elements that are not zero in float64.

    `scale` is the largest power of two under which every float16 gradient is finite.
    """
    twins = {policy: twin.load(arm.framework, arm.config.replace(policy=policy))
             for policy in ("fp64", "fp16", "bf16")}  # fmt: skip
    batch = GPT.window(arm.config, state.step).select(0)

    def trace(policy: str, scale: float = 1.0) -> BatchTrace:
        twins[policy].load(replace(state, loss_scale=scale, good_steps=0))
        return twins[policy].trace(batch)

    exact = trace("fp64")
    scale = LARGEST_SCALE
    while not is_finite(scaled := trace("fp16", scale)) and scale > 1:
        scale /= 2
    found = {"fp16, no scale": trace("fp16"), "fp16, scaled": scaled, "bf16": trace("bf16")}
    return {
        "parameters": {name: zero_share(each.grads, exact.grads) for name, each in found.items()},
        "activations": {
            name: zero_share(each.activation_grads, exact.activation_grads)
            for name, each in found.items()
        },
        "scale": scale,
    }  # fmt: skip


def is_finite(trace: BatchTrace) -> bool:
    grads = [*trace.grads.values(), *trace.activation_grads.values()]
    return all(np.isfinite(grad).all() for grad in grads)


def zero_share(grads: Arrays, exact: Arrays) -> float:
    """Share of the elements."""
    lost = sum(int(((grads[name] == 0) & (exact[name] != 0)).sum()) for name in exact)
    return lost / sum(int(np.count_nonzero(grad)) for grad in exact.values())


def inject_overflow(arm: Arm) -> Result:
    """A token with an infinite embedding stands in the window of the middle step alone.

    `unchanged` says that this step moved no weight.
    """
    at = arm.steps // 2
    windows = stack_batches([GPT.window(arm.config, step) for step in range(arm.steps)])
    chosen = np.zeros(windows.tokens.shape[:2], bool)
    chosen[at] = True
    assert GPT.overflowing
    config, state, windows = GPT.overflowing(arm.config, windows, chosen)
    built = start(arm.framework, config, state)
    taken = []
    for step, window in enumerate(windows.split()):
        before = built.state().params if step == at else {}
        taken.append(built.step(built.place(window))())
        if step == at:
            after = built.state().params
            unchanged = all(np.array_equal(before[name], after[name]) for name in after)
    found = {"at": at, "unchanged": unchanged} | report_steps(taken)
    return found | {"loss_scale": built.state().loss_scale}


def updates(arm: Arm) -> Result:
    """The arm's steps at its rate, from weights that as many steps under fp32 have made.

    `lost` has for each step the share of the weights that it left as they were, of those that had
    a gradient: embeddings of tokens not yet seen have none.
    """
    config = arm.config.replace(steps=2 * arm.steps)
    before = config.replace(**PRETRAINING, warmup=arm.steps // 10)
    begun = train_on(arm.framework, before, initial_state(before), arm.steps)
    built = start(arm.framework, config, begun)
    first = held_out(built, config)
    state, losses, lost = built.state(), [], []
    for step in range(arm.steps, 2 * arm.steps):
        losses.append(built.step(built.place(GPT.window(config, step)))().loss)
        former, state = state, built.state()
        lost.append(unmoved_share(former, state))
    return {
        "losses": losses, "lost": lost, "lost_share": float(np.mean(lost)),
        "validation_losses": [first, held_out(built, config)],
    }  # fmt: skip


def unmoved_share(before: TrainState, after: TrainState) -> float:
    """Returns the share of weights that did not move, of those that had a gradient."""
    same = moving = 0
    for name, weight in after.params.items():
        has_gradient = after.mu[name] != 0
        moving += int(has_gradient.sum())
        same += int((has_gradient & (weight == before.params[name])).sum())
    return same / moving


WORKS: dict[str, Callable[[Arm], Result]] = {
    "train": train, "seeds": train_seeds, "seeds to nearest": train_to_nearest,
    "flushed": measure_flushed, "injected": inject_overflow,
    "updates": updates, "sums": sums,
}  # fmt: skip


def perform(**arm: Any) -> Result:
    """The result of an arm that is given by its fields."""
    return WORKS[arm["work"]](Arm(**arm))
