"""Delayed scaling: an operand is rounded under a scale that is known before the operand is.

An amax is the largest number of an operand. The gradient of a product's scales (3,) is the amaxes
of its x, weight and dy: so the backward pass hands them out, and what is recomputed finds none
twice. A step records them once, in a history (3, HISTORY), the newest first, and its scales are
those of the history before it.

Histories are in units of the whole batch's loss, not scaled: whatever the loss scale or the number
of processes, the same numbers are rounded. A step that is skipped records nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jmp
from flax import nnx
from jax import Array

from lockstep.data.batch import Batch
from lockstep.formats.table import Recipe

from ... import step
from ...functional import Product
from ...step import Carry, Params
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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DelayedState(step.State):
    """The state of a run with delayed scaling."""

    amaxes: Named  # histories (3, HISTORY)


class Delayed(step.Trainer):
    """A trainer that records amaxes, and hands the model the scales that follow from them."""

    state: DelayedState
    known: Named  # the scales of the step that is being traced
    found: Named  # and its amaxes

    def weights(self, state: step.State) -> Params:
        return super().weights(state) | self.scales(state)

    def scales(self, state: step.State) -> Named:
        assert isinstance(state, DelayedState)
        return make_scales(state.amaxes, self.scale(state).loss_scale)

    def step_function(self, state: step.State, window: Batch) -> tuple[step.State, step.Metrics]:
        assert isinstance(state, DelayedState)
        after, metrics = super().step_function(state, window)
        amaxes = self.update_amaxes(state, self.scale(state), ~metrics.skipped, self.found)
        return replace(after, amaxes=amaxes), metrics  # type: ignore[call-arg]

    def accumulate(
        self, state: step.State, window: Batch, scale: jmp.LossScale
    ) -> tuple[Carry, Array]:
        self.known = self.scales(state)
        carry, (losses, found) = super().accumulate(state, window, scale)
        self.found = join(found)
        return carry, losses

    def backward(
        self, loss: Callable[[Params], Array], params: Params, scale: jmp.LossScale
    ) -> tuple[Any, Params]:
        """Returns the loss with the amaxes, which are the gradients of the scales."""
        value, grads = super().backward(loss, params | self.known, scale)
        return (value, {name: grads.pop(name) for name in self.known}), grads

    def update_amaxes(
        self, state: DelayedState, scale: jmp.LossScale, finite: Array, found: Named
    ) -> Named:
        """The histories with what this step has seen, unless it was skipped."""
        recorded = {
            name: ROUNDING.record(history, found[name + SCALES], scale.loss_scale)
            for name, history in state.amaxes.items()
        }
        return jax.tree.map(partial(jnp.where, finite), recorded, state.amaxes)


def make_scales(histories: Named, loss_scale: Array) -> Named:
    """Returns each layer's scales (3,)."""
    return {name + SCALES: ROUNDING.scales(x, loss_scale) for name, x in histories.items()}


def join(found: Named) -> Named:
    """The largest amaxes (3,) of the micro-batches' (N, 3)."""
    return {name: amaxes.max(0) for name, amaxes in found.items()}
