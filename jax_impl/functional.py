"""Kernels of `torch.nn.functional` in JAX: the same names, arguments and roundings.

In every remat mode `jax.checkpoint` saves only the inputs of RMSNorm and activations, as torch's
kernels do; their recomputation has no matmul. With prevent_cse=False XLA may save the result too.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from .remat import AFFINE

Product = Callable[[Array, Array, Array | None], Array]  # rows, weight, bias or None


def linear(x: Array, weight: Array, bias: Array | None) -> Array:
    """Computes rows (R, in) @ weight (in, out) + bias (out); torch's weight is out x in."""
    return jnp.matmul(x, weight) if bias is None else affine(x, weight, bias)


def affine_by(
    multiply: Callable[..., Array], of_rows: Callable[..., Array] | None = None, least: str = "f4"
) -> Product:
    """Returns a function for rows @ weight + bias, which rounds once, as a GEMM's epilogue does.

    Args:
        multiply: `jnp.matmul` or a replacement.
        of_rows: multiplies for the weight's gradient, a sum over the rows; None: `multiply`.
        least: the bias is added in this dtype, or in the rows' if that is wider.
    """
    of_rows = of_rows or multiply

    @jax.custom_vjp
    def affine(x: Array, weight: Array, bias: Array | None) -> Array:
        if bias is None:
            return multiply(x, weight)
        wide = jnp.promote_types(x.dtype, least)
        y = multiply(x, weight, preferred_element_type=wide)
        return (y + bias.astype(wide)).astype(x.dtype)

    def forward(x: Array, weight: Array, bias: Array | None) -> tuple[Array, tuple]:
        no_bias = None if bias is None else bias[:0]  # for its dtype
        return checkpoint_name(affine(x, weight, bias), AFFINE), (x, weight, no_bias)

    def backward(kept: tuple, dy: Array) -> tuple[Array, Array, Array | None]:
        x, weight, no_bias = kept
        dx, dweight = multiply(dy, weight.T), of_rows(x.T, dy).astype(weight.dtype)
        if no_bias is None:
            return dx, dweight, None
        dbias = widen(dy).sum(0).astype(dy.dtype)  # may overflow float16, as in torch
        return dx, dweight, dbias.astype(no_bias.dtype)

    affine.defvjp(forward, backward)
    return affine


affine = affine_by(jnp.matmul)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def layer_norm(x: Array, weight: Array, bias: Array | None, eps: float) -> Array:
    """Normalizes rows (..., D) to mean 0 and variance 1, times weight (D,) plus bias (D,)."""
    return layer_norm_forward(x, weight, bias, eps)[0]


def layer_norm_forward(
    x: Array, weight: Array, bias: Array | None, eps: float
) -> tuple[Array, tuple]:
    """Returns the normalized rows, and what the backward pass needs."""
    mean, variance = moments(x)
    rstd = jax.lax.rsqrt(variance + eps)
    y = (x - mean) * rstd * weight
    biased = None if bias is None else ()
    return y if bias is None else y + bias, (x, weight, biased, mean, rstd)


def layer_norm_backward(eps: float, kept: tuple, dy: Array) -> tuple[Array, Array, Array | None]:
    x, weight, biased, mean, rstd = kept
    rows = tuple(range(dy.ndim - 1))
    normal, dnormal = (x - mean) * rstd, dy * weight
    slope = (dnormal * normal).mean(-1, keepdims=True)
    dx = rstd * (dnormal - dnormal.mean(-1, keepdims=True) - normal * slope)
    return dx, (dy * normal).sum(rows), None if biased is None else dy.sum(rows)


layer_norm.defvjp(layer_norm_forward, layer_norm_backward)


def moments(x: Array) -> tuple[Array, Array]:
    """Computes mean and variance of (..., D), each (..., 1), in two passes: E[x^2] - E[x]^2 loses
    all digits if the mean is large."""
    mean = x.mean(-1, keepdims=True)
    return mean, jnp.square(x - mean).mean(-1, keepdims=True)


@partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Divides rows (..., D) by their root mean square, and multiplies them by weight (D,)."""
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + eps) * weight


def gelu(x: Array, approximate: str) -> Array:
    """Computes GELU by tanh ("tanh") or by erf ("none"), as torch names the two forms."""
    return in_float32(partial(jax.nn.gelu, approximate=approximate == "tanh"), x)


def silu(x: Array) -> Array:
    return in_float32(jax.nn.silu, x)


def in_float32(function: Callable[[Array], Array], x: Array) -> Array:
    """Computes a function in at least float32, rounds once, and saves only x for backward."""
    return jax.checkpoint(lambda x: function(widen(x)).astype(x.dtype))(x)


def widen(x: Array) -> Array:
    """Casts to at least float32."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


@jax.custom_vjp
def cross_entropy(logits: Array, targets: Array) -> Array:
    """Computes the losses (...) of logits (..., V) and targets (...) in at least float32."""
    return _cross_entropy_forward(logits, targets)[0]


def _cross_entropy_forward(logits: Array, targets: Array) -> tuple[Array, tuple]:
    wide = widen(logits)
    log_sums = jax.lax.platform_dependent(
        wide, cpu=partial(jax.nn.logsumexp, axis=-1), default=logsumexp
    )
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1).squeeze(-1)
    return log_sums - chosen.astype(wide.dtype), (logits, targets, log_sums)


def _cross_entropy_backward(kept: tuple, dy: Array) -> tuple[Array, None]:
    """Computes softmax minus one-hot targets in one pass; autodiff would scatter into float32."""
    logits, targets, log_sums = kept
    probs = jnp.exp(logits.astype(dy.dtype) - log_sums[..., None])
    is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
    return ((probs - is_target) * dy[..., None]).astype(logits.dtype), None


cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def logsumexp(x: Array) -> Array:
    """Reduces (..., V) to (...), reading x once for maximum and sum; CPUs prefer two passes."""

    def join(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
        (top, total), (other_top, other) = left, right
        new = jnp.maximum(top, other_top)
        return new, total * jnp.exp(top - new) + other * jnp.exp(other_top - new)

    zero, lowest = jnp.zeros((), x.dtype), jnp.array(jnp.finfo(x.dtype).min)  # -inf - -inf is NaN
    top, total = jax.lax.reduce((x, jnp.ones_like(x)), (lowest, zero), join, (x.ndim - 1,))
    return top + jnp.log(total)
