"""Delayed scaling: what an operand is rounded under is known before it is.

An amax is the largest number of an operand. The gradient of a linear layer's scales (3,) is the
amaxes of its x, weight and dy: what is recomputed finds none twice. A step records them once, in a
history (3, HISTORY), the newest first, and its scales are those of the history before it.

Histories are in units of the whole batch's loss, not scaled: whatever the loss scale or the number
of processes, the same numbers are rounded. A step that is skipped records nothing.
"""

import jax.numpy as jnp
from jax import Array

from lockstep.formats.table import DELAYED

from .rounding import power_of_two

Named = dict[str, Array]  # by linear layer
SCALES = ".scales"  # of a layer, as a parameter's name has it


def scales(histories: Named, loss_scale: Array) -> Named:
    """Of each layer (3,), powers of two; 1 where nothing is recorded yet."""
    return {name + SCALES: _scales(history, loss_scale) for name, history in histories.items()}


def _scales(history: Array, loss_scale: Array) -> Array:
    sizes = history.max(1) * units(loss_scale)
    operands = zip(sizes, DELAYED.operands)
    known = [power_of_two(size, "up", to.largest) for size, to in operands if to]
    return jnp.where(sizes > 0, jnp.stack(known), power_of_two(units(loss_scale), "up", 1.0))


def units(loss_scale: Array) -> Array:
    """What is derived is the loss times its scale: dy is so many times that of the loss."""
    return jnp.array([1.0, 1.0, loss_scale], jnp.float32)


def join(one: Named, other: Named) -> Named:
    """The amaxes of both, such as those of two micro-batches."""
    return {name: jnp.maximum(one.get(name, found), found) for name, found in other.items()}


def record(histories: Named, found: Named, loss_scale: Array) -> Named:
    """Amaxes (3,) of one step, before the others; what is not finite is no size."""
    named = {name: (history, found[name + SCALES]) for name, history in histories.items()}
    return {name: _record(*each, loss_scale) for name, each in named.items()}


def _record(history: Array, found: Array, loss_scale: Array) -> Array:
    found = found / units(loss_scale)
    found = jnp.where(jnp.isfinite(found), found, 0)
    return jnp.concatenate([found[:, None], history[:, :-1]], axis=1)
