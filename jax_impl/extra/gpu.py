"""Forms of the core's functions for a GPU or TPU: faster ones, and one that rounds as written."""

from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from .. import model
from ..functional import Product, affine_by, layer_norm_backward, moments, widen


class FusedLayerNorm(model.LayerNorm):
    """A `model.LayerNorm` whose rows are read once.

    Args:
        one_kernel: see `layer_norm`.
    """

    def __init__(self, d: int, eps: float, *, one_kernel: bool, **rest: Any) -> None:
        super().__init__(d, eps, **rest)
        self.one_kernel = one_kernel

    def __call__(self, x_RD: Array) -> Array:
        bias = None if self.bias is None else widen(self.bias[...])
        weight = widen(self.weight[...])
        return layer_norm(widen(x_RD), weight, bias, self.eps, self.one_kernel)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def layer_norm(x: Array, weight: Array, bias: Array | None, eps: float, one_kernel: bool) -> Array:
    """`functional.layer_norm`, its moments made in one pass.

    Args:
        one_kernel: the forward pass makes moments of its own, other than those that the backward
            pass takes. XLA then writes the norm as one kernel on Ampere and later, in half
            precision, and the others come from the kernel before it.
    """
    return layer_norm_forward(x, weight, bias, eps, one_kernel)[0]


def layer_norm_forward(
    x: Array, weight: Array, bias: Array | None, eps: float, one_kernel: bool
) -> tuple[Array, tuple]:
    """The norm, and what its backward pass needs."""
    mean, variance = moments_in_one_pass(x)
    kept = x, weight, None if bias is None else (), mean, jax.lax.rsqrt(variance + eps)
    mean, variance = moments(x) if one_kernel else (mean, variance)
    y = (x - mean) * jax.lax.rsqrt(variance + eps) * weight
    return y if bias is None else y + bias, kept


layer_norm.defvjp(
    layer_norm_forward, lambda eps, one_kernel, kept, dy: layer_norm_backward(eps, kept, dy)
)


def moments_in_one_pass(x: Array) -> tuple[Array, Array]:
    """Mean and variance of (..., D), each (..., 1), x read once.

    Counts, means and sums of squares are joined (Chan et al. 1979).
    """

    def join(left: tuple[Array, ...], right: tuple[Array, ...]) -> tuple[Array, ...]:
        (n, mean, squares), (m, other, other_squares) = left, right
        weight, apart = m / jnp.maximum(n + m, 1), other - mean
        return n + m, mean + apart * weight, squares + other_squares + apart * apart * n * weight

    zero = jnp.zeros((), x.dtype)
    ones, zeros = jnp.ones_like(x), jnp.zeros_like(x)
    n, mean, squares = jax.lax.reduce((ones, x, zeros), (zero,) * 3, join, (x.ndim - 1,))
    return mean[..., None], (squares / n)[..., None]


def cut_heads(x_BTHK: Array, ends: tuple[int, ...]) -> list[Array]:
    """Slices: their gradient is a sum, which XLA fuses with the bias's."""
    return [x_BTHK[:, :, start:end] for start, end in pairwise((0, *ends, None))]


def linear_in(dtype: str) -> Product:
    """`functional.linear`, whose bias is added in this dtype, that of the operands.

    cuBLAS adds such a bias to its sums, before they are rounded, as it does for torch. One in
    float32 it takes only if the result is in float32, too.
    """
    affine = affine_by(jnp.matmul, least=dtype)

    def run(x: Array, weight: Array, bias: Array | None) -> Array:
        return jnp.matmul(x, weight) if bias is None else affine(x, weight, bias)

    return run


def round_apart(product: Product) -> Product:
    """Puts barriers around a product: it and its gradients are rounded before they are added.

    XLA computes x + y in float32, where y was rounded to half precision, by one call of cuBLAS that
    does not round y, even if `xla_allow_excess_precision` is off. It looks through no barrier.
    """
    apart = jax.lax.optimization_barrier  # its transpose, of a gradient, is a barrier too

    def run(x: Array, weight: Array, bias: Array | None) -> Array:
        return apart(product(apart(x), apart(weight), bias))

    return run
