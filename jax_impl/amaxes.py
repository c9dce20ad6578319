"""Delayed scaling: what an operand is rounded under is known before it is.

An amax is the largest number of an operand. The gradient of a linear layer's scales (3,) is the
amaxes of its x, weight and dy: what is recomputed finds none twice. A step records them once, in a
history (3, HISTORY), the newest first, and its scales are those of the history before it.
"""

import jax.numpy as jnp
from jax import Array

from lockstep.formats.table import DELAYED

from .rounding import power_of_two

Named = dict[str, Array]  # by linear layer
SCALES = ".scales"  # of a layer, as a parameter's name has it


def scales(histories: Named) -> Named:
    """Of each layer (3,), powers of two; 1 where nothing is recorded yet."""
    return {name + SCALES: _scales(history) for name, history in histories.items()}


def _scales(history: Array) -> Array:
    sizes = history.max(1)
    operands = zip(sizes, DELAYED.operands)
    known = [power_of_two(size, "up", to.largest) for size, to in operands if to]
    return jnp.where(sizes > 0, jnp.stack(known), 1)


def join(one: Named, other: Named) -> Named:
    """The amaxes of both, such as those of two micro-batches."""
    return {name: jnp.maximum(one.get(name, found), found) for name, found in other.items()}


def record(histories: Named, found: Named) -> Named:
    """Amaxes (3,) of one step, before the others; what is not finite is no size."""
    return {name: _record(history, found[name + SCALES]) for name, history in histories.items()}


def _record(history: Array, found: Array) -> Array:
    found = jnp.where(jnp.isfinite(found), found, 0)
    return jnp.concatenate([found[:, None], history[:, :-1]], axis=1)
