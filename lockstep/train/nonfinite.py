"""Finds the first tensor that is not finite, in a repeated step.

The batches are a function of the step and the weights of the checkpoint before it, so that the
step need not have been watched when it was taken.
"""

import contextlib
from pathlib import Path

import numpy as np

from lockstep.config import Config
from lockstep.data import batches
from lockstep.data.batch import Batch
from lockstep.data.corpus import Corpus
from lockstep.errors import UserError
from lockstep.model.params import Arrays
from lockstep.model.state import TrainState
from lockstep.run import checkpoint
from lockstep.twin import Twin


def replay(twin: Twin, config: Config, data: Corpus, start: TrainState, step: int) -> None:
    """Repeats the steps from a state up to the one before `step`, without reports."""
    twin.load(start)
    for number in range(start.step, step - 1):
        twin.step(twin.place(batches.of_step(config, data.train, number)))()


def state_before(run: Path, step: int) -> TrainState | None:
    """Load the newest checkpoint before a step that can be loaded."""
    for path in reversed(checkpoint.listing(run)):
        if checkpoint.step_of(path) < step:
            with contextlib.suppress(UserError):
                return checkpoint.load(path)
    return None


def first_bad_tensor(twin: Twin, window: Batch) -> str:
    """Name the first tensor that is not finite in a step on a window (N, B, T), or "".

    Weights, then of each micro-batch the outputs in the order of the forward pass, the loss, the
    gradients in the order of the backward pass. Dropout is off, and nothing is fused or recomputed.
    """
    if bad := _bad(twin.state().params):
        return f"the weights {bad[0]}"
    for number, batch in enumerate(window.split(), 1):
        trace = twin.trace(batch)
        backwards, grads = (
            dict(reversed(g.items())) for g in (trace.activation_grads, trace.grads)
        )
        where = f"in micro-batch {number} of {len(window.tokens)}"
        if bad := _bad(trace.activations):
            return f"the output of {bad[0]} {where} ({_extent(trace.activations, *bad)})"
        if not np.isfinite(trace.loss):
            return f"the loss {where}"
        if bad := _bad(backwards):
            return f"the gradient at the output of {bad[0]} {where} ({_extent(backwards, *bad)})"
        if bad := _bad(grads):
            return f"the gradient of {bad[0]} {where}"
    return ""


def _bad(arrays: Arrays) -> list[str]:
    """Lists the names of non-finite tensors, in order."""
    return [name for name, array in arrays.items() if not np.isfinite(array).all()]


def _extent(arrays: Arrays, first: str, *others: str) -> str:
    """Describes how much of a tensor is not finite, and the size of the tensor before it."""
    bad, names = arrays[first], list(arrays)
    share = f"{np.count_nonzero(~np.isfinite(bad)):,} of {bad.size:,} numbers"
    place = names.index(first)
    if place == 0:
        return share
    before = names[place - 1]
    return f"{share}; {before} reaches {np.abs(arrays[before]).max():.3g}"
