"""Dropout whose masks are a pure function of (seed, step, micro-step, layer, site).

The masks are those of `jax.random.bernoulli`, drawn by threefry2x32 under strict and fast numerics
alike; the torch twin draws the same masks under strict numerics.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.random import fold_in

from lockstep.model.constants import SITES


class Dropout:
    """Called as dropout(x, layer, site); keeps its input's dtype."""

    def __init__(
        self, rate: float, *, seed: int, step: Array | int, micro_step: Array | int
    ) -> None:
        self.rate = rate
        key = jax.random.key(seed, impl="threefry2x32")
        self.key = fold_in(fold_in(key, step), micro_step)

    @classmethod
    def off(cls) -> "Dropout":
        return cls(0.0, seed=0, step=0, micro_step=0)

    def __call__(self, x: Array, layer: Array | int, site: str) -> Array:
        if not self.rate:
            return x
        # A Python float would draw 64-bit uniforms under x64: other masks.
        keep = jax.random.bernoulli(self.key_of(layer, site), jnp.float32(1 - self.rate), x.shape)
        # x * (1 / keep): XLA turns a division by a constant into this, torch does not.
        scaled = x.astype(jnp.promote_types(x.dtype, jnp.float32)) * (1 / (1 - self.rate))
        return jnp.where(keep, scaled.astype(x.dtype), 0)

    def key_of(self, layer: Array | int, site: str) -> Array:
        return fold_in(fold_in(self.key, layer + 1), SITES[site])
