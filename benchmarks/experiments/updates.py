"""Updates too small for the weights they are added to."""

import numpy as np

from benchmarks.experiments.arm import Arm
from benchmarks.experiments.flushing import trained
from benchmarks.experiments.held_out import held_out
from benchmarks.measure import Result
from lockstep import twin
from lockstep.model.state import TrainState, initial_state
from lockstep.parity.pair import GPT

PRETRAINING = {"policy": "fp32", "lr": 2e-3, "min_lr": 2e-4}


def updates(arm: Arm) -> Result:
    """The arm's steps at its rate, from weights that as many steps under fp32 have made.

    `lost` has for each step the share of the weights that it left as they were, of those that had
    a gradient: embeddings of tokens not yet seen have none.
    """
    config = arm.config.changed(steps=2 * arm.steps)
    before = config.changed(**PRETRAINING, warmup=arm.steps // 10)
    start = trained(arm.framework, before, initial_state(before), arm.steps)
    built = twin.load(arm.framework, config)
    built.load(start)
    first = held_out(built, config)
    state, losses, lost = built.state(), [], []
    for step in range(arm.steps, 2 * arm.steps):
        losses.append(built.step(built.place(GPT.window(config, step)))().loss)
        former, state = state, built.state()
        lost.append(unmoved(former, state))
    return {
        "losses": losses, "lost": lost, "lost_share": float(np.mean(lost)),
        "validation_losses": [first, held_out(built, config)],
    }  # fmt: skip


def unmoved(before: TrainState, after: TrainState) -> float:
    same = moving = 0
    for name, weight in after.params.items():
        has_gradient = after.mu[name] != 0
        moving += int(has_gradient.sum())
        same += int((has_gradient & (weight == before.params[name])).sum())
    return same / moving
