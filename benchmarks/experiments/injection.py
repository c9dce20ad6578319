"""One overflow at a chosen step, so that backoff is seen whether or not training gives one."""

import numpy as np

from benchmarks.experiments.arm import Arm
from benchmarks.measure import Result
from lockstep import twin
from lockstep.model.params import Arrays
from lockstep.parity.pair import GPT


def injected(arm: Arm) -> Result:
    """A token with an infinite embedding stands in the window of the middle step alone.

    `unchanged` says that this step moved no weight.
    """
    at = arm.steps // 2
    windows = np.stack([GPT.window(arm.config, step) for step in range(arm.steps)])
    chosen = np.zeros(windows.shape[:2], bool)
    chosen[at] = True
    assert GPT.overflowing
    config, state, windows = GPT.overflowing(arm.config, windows, chosen)
    built = twin.load(arm.framework, config)
    built.load(state)
    results = []
    for step, window in enumerate(windows):
        before = built.state().params if step == at else {}
        results.append(built.step(built.place(window))())
        if step == at:
            unchanged = same(before, built.state().params)
    return {
        "at": at, "unchanged": unchanged, "losses": [result.loss for result in results],
        "loss_scales": [result.loss_scale for result in results],
        "skipped_steps": [step for step, result in enumerate(results) if result.skipped],
        "loss_scale": built.state().loss_scale,
    }  # fmt: skip


def same(a: Arrays, b: Arrays) -> bool:
    return all(np.array_equal(a[name], b[name]) for name in a)
