"""LoRA: a linear layer with a product of two narrow matrices added (Hu et al. 2021, 2106.09685)."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from ..model import Linear, normal


class LoRALinear(Linear):
    """x W + b + alpha / rank * (x A) B, with A (d_in, rank) and B (rank, d_out)."""

    def __init__(self, d_in: int, d_out: int, *, rank: int, scale: float, **rest: Any) -> None:
        super().__init__(d_in, d_out, **rest)
        self.scale = scale
        dtype = self.policy.param_dtype
        self.lora_a = nnx.Param(normal(rest["rngs"].params(), (d_in, rank), dtype))
        self.lora_b = nnx.Param(jnp.zeros((rank, d_out), dtype))

    def __call__(self, x_RD: Array) -> Array:
        # Before the base: the last product of what remat recomputes is one that is not needed.
        added_RD = scale(self.adapt(x_RD), self.scale)
        return super().__call__(x_RD) + added_RD

    def adapt(self, x_RD: Array) -> Array:
        return self.multiply(self.multiply(x_RD, self.lora_a[...]), self.lora_b[...])


def scale(x: Array, by: float) -> Array:
    """x * by, rounded once: JAX would round the number to x's dtype first."""
    return (x.astype(jnp.promote_types(x.dtype, jnp.float32)) * by).astype(x.dtype)
