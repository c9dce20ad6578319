"""Delayed scaling: an operand is rounded under a scale that is known before the operand is.

An amax is the largest number of an operand. The gradient of a product's scales (3,) is the amaxes
of its x, weight and dy: so the backward pass hands them out, and what is recomputed finds none
twice. A step records them once, in a history (3, HISTORY), the newest first, and its scales are
those of the history before it.

Histories are in units of the whole batch's loss, not scaled: whatever the loss scale or the number
of processes, the same numbers are rounded. A step that is skipped records nothing.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import jmp
from flax import nnx
from jax import Array

from lockstep.formats.table import Recipe

from ...functional import Product
from ...step import State
from .products import rounded_linear
from .rounding import ROUNDING

Named = dict[str, Array]  # by linear layer
SCALES = ".product.scales"  # the name of a layer's scales


class Scales(nnx.Variable):
    """float32 (3,): the scales of x, weight and dy. No parameter: no optimizer moves them."""


class DelayedProduct(nnx.Module):
    """Rows (R, in) @ weight (in, out) + bias (out), rounded under given scales.

    Args:
        wrap: what a mesh puts around the product, to gather the weights that devices share.
    """

    def __init__(self, recipe: Recipe, wrap: Callable[[Product], Product] | None = None) -> None:
        self.recipe, self.wrap, self.scales = recipe, wrap, Scales(jnp.ones(3))

    def __call__(self, x: Array, weight: Array, bias: Array | None) -> Array:
        def product(x: Array, weight: Array, bias: Array | None) -> Array:
            return rounded_linear(self.recipe, x, weight, bias, self.scales[...])

        return (self.wrap(product) if self.wrap else product)(x, weight, bias)


class Delayed:
    """Records a step's amaxes, and makes the scales that follow from them."""

    def scales(self, state: State, scale: jmp.LossScale) -> Named:
        return make_scales(state.amaxes, scale.loss_scale)

    def update_amaxes(
        self, state: State, scale: jmp.LossScale, finite: Array, seen: Named
    ) -> Named:
        """The histories with what this step has seen, unless it was skipped.

        Args:
            finite: by tensor, whether its gradient was; a step is skipped if one is not.
            seen: amaxes (N, 3) of the micro-batches, by the name of the scales.
        """
        found = join(seen)
        recorded = {
            name: ROUNDING.record(history, found[name + SCALES], scale.loss_scale)
            for name, history in state.amaxes.items()
        }
        return jax.tree.map(partial(jnp.where, finite.all()), recorded, state.amaxes)


def make_scales(histories: Named, loss_scale: Array) -> Named:
    """Makes each layer's scales (3,)."""
    return {name + SCALES: ROUNDING.scales(x, loss_scale) for name, x in histories.items()}


def join(found: Named) -> Named:
    """The largest amaxes (3,) of the micro-batches' (N, 3)."""
    return {name: amaxes.max(0) for name, amaxes in found.items()}
