"""Stochastic rounding: each product draws with a key of its own, set once a micro-batch."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from lockstep.formats.table import Recipe

from ... import step
from ...dropout import Dropout
from ...step import Params
from .products import rounded_linear

KEY = ".product.key"  # the name of a layer's key


class DrawKey(nnx.Variable):
    """uint32 (2,): the data of a threefry key."""


class StochasticProduct(nnx.Module):
    """Rows (R, in) @ weight (in, out) + bias (out), with gradients rounded at random."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.key = recipe, DrawKey(jnp.zeros(2, jnp.uint32))

    def __call__(self, x: Array, weight: Array, bias: Array | None) -> Array:
        key = jax.random.wrap_key_data(self.key[...], impl="threefry2x32")
        return rounded_linear(self.recipe, x, weight, bias, key)


class Stochastic(step.Trainer):
    """A trainer whose products draw: by seed, step, micro-step, layer and linear layer."""

    def weights(self, state: step.State, dropout: Dropout) -> Params:
        keys = {}
        for name in self.model.others:
            if name.endswith(KEY):
                _, layer, *_, linear = name.removesuffix(KEY).split(".")
                keys[name] = jax.random.key_data(dropout.key_of(int(layer), linear))
        return super().weights(state, dropout) | keys
