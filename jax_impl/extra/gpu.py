"""LayerNorm in the form that XLA writes as one kernel on Ampere and later, in half precision."""

from functools import partial

import jax
from jax import Array

from .. import model
from ..functional import layer_norm_backward, layer_norm_forward, moments


class LayerNorm(model.LayerNorm):
    """A `model.LayerNorm` that XLA writes as one kernel."""

    def __call__(self, x_RD: Array) -> Array:
        weight = self.weight[...].astype(x_RD.dtype)
        bias = None if self.bias is None else self.bias[...].astype(x_RD.dtype)
        return layer_norm(x_RD, weight, bias, self.eps)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def layer_norm(x: Array, weight: Array, bias: Array | None, eps: float) -> Array:
    """The forward pass makes moments of its own, other than those that the backward pass takes:
    XLA then writes the norm as one kernel, and the others come from the kernel before it."""
    return _forward(x, weight, bias, eps)[0]


def _forward(x: Array, weight: Array, bias: Array | None, eps: float) -> tuple[Array, tuple]:
    _, kept = layer_norm_forward(x, weight, bias, eps)
    mean, variance = moments(x)
    y = (x - mean) * jax.lax.rsqrt(variance + eps) * weight
    return y if bias is None else y + bias, kept


layer_norm.defvjp(_forward, layer_norm_backward)
