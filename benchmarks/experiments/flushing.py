"""Which share of the gradients half precision flushes to zero, with a loss scale and without."""

from dataclasses import replace

import numpy as np

from benchmarks.experiments.arm import Arm
from benchmarks.measure import Result
from lockstep import twin
from lockstep.config import Config
from lockstep.model.params import Arrays
from lockstep.model.state import TrainState, initial_state
from lockstep.parity.pair import GPT
from lockstep.twin import Trace

LARGEST = 2.0**24


def flushed(arm: Arm) -> Result:
    """Of the initial weights, and of those after the arm's steps under fp32."""
    config = arm.config
    start = initial_state(config)
    end = trained(arm.framework, config.changed(policy="fp32"), start, arm.steps)
    return {"weights": {"initial": shares(arm, start), "trained": shares(arm, end)}}


def trained(framework: str, config: Config, state: TrainState, steps: int) -> TrainState:
    """The state after so many steps more."""
    built = twin.load(framework, config)
    built.load(state)
    for step in range(state.step, state.step + steps):
        built.step(built.place(GPT.window(config, step)))()
    return built.state()


def shares(arm: Arm, state: TrainState) -> Result:
    """Of the gradient elements that are not zero in float64, those that are zero.

    `scale` is the largest power of two under which every float16 gradient is finite.
    """
    twins = {policy: twin.load(arm.framework, arm.config.changed(policy=policy))
             for policy in ("fp64", "fp16", "bf16")}  # fmt: skip
    batch = GPT.window(arm.config, state.step)[0]

    def trace(policy: str, scale: float = 1.0) -> Trace:
        twins[policy].load(replace(state, loss_scale=scale, good_steps=0))
        return twins[policy].trace(batch)

    exact = trace("fp64")
    scale = LARGEST
    while not finite(scaled := trace("fp16", scale)) and scale > 1:
        scale /= 2
    found = {"fp16, no scale": trace("fp16"), "fp16, scaled": scaled, "bf16": trace("bf16")}
    return {
        "parameters": {name: zero(each.grads, exact.grads) for name, each in found.items()},
        "activations": {
            name: zero(each.activation_grads, exact.activation_grads)
            for name, each in found.items()
        },
        "scale": scale,
    }  # fmt: skip


def finite(trace: Trace) -> bool:
    grads = [*trace.grads.values(), *trace.activation_grads.values()]
    return all(np.isfinite(grad).all() for grad in grads)


def zero(grads: Arrays, exact: Arrays) -> float:
    """Share of the elements."""
    lost = sum(int(((grads[name] == 0) & (exact[name] != 0)).sum()) for name in exact)
    return lost / sum(int(np.count_nonzero(grad)) for grad in exact.values())
