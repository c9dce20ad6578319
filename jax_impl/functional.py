"""What `torch.nn.functional` has as kernels, in JAX: the same names, arguments and roundings.

What a fused kernel of torch would not keep for the backward pass is recomputed here, too.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from lockstep.model.attention import tile

from .extra.formats.products import Narrow, Product, keep
from .extra.mesh.gather import divides_rows
from .remat import AFFINE, recompute, recompute_cheap


def linear(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    key: Array | None = None,
    scales: Array | None = None,
    narrow: Narrow = keep,
) -> Array:
    """Rows (R, in) @ weight (in, out); torch's weight is out x in.

    key: of what stochastic rounding draws. scales: of x, weight and dy, where they are delayed.
    """
    if narrow not in (keep, sum_in_float32):
        return narrow(jnp.matmul)(x, weight, bias, key, scales)
    # The other's derivative is not JAX's own.
    if bias is None and narrow is keep and not divides_rows():
        return jnp.matmul(x, weight)
    return affine(x, weight, bias, narrow)


def head(x: Array, weight: Array, bias: Array | None = None, narrow: Narrow = keep) -> Array:
    """`linear`, its weight's gradient made with that of x: XLA keeps the logits' until then."""
    return linear(*_together(x, weight), bias, narrow=narrow)


_together = jax.custom_vjp(lambda x, weight: (x, weight))
_together.defvjp(
    lambda x, weight: ((x.value, weight.value), () if weight.perturbed else None),
    # Of a frozen weight the gradient is nobody's, and XLA leaves it out.
    lambda trained, grads: grads if trained is None else jax.lax.optimization_barrier(grads),
    symbolic_zeros=True,
)


def sum_in_float32(product: Product) -> Product:
    """Rows times weights in bfloat16, in the one form that XLA has a fast kernel for on a CPU:
    float32 is asked for, and rounded here; both operands lie in memory row by row."""

    def lay_out(x: Array) -> Array:
        # A transposed operand is only a view to XLA, until something wants it flat.
        return jax.lax.optimization_barrier(x.reshape(-1)).reshape(x.shape)

    def multiply(a: Array, b: Array) -> Array:
        y = jnp.matmul(lay_out(a), lay_out(b), preferred_element_type=jnp.float32)
        return y.astype(jax.eval_shape(product, a, b).dtype)

    return multiply


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def affine(x: Array, weight: Array, bias: Array | None, narrow: Narrow = keep) -> Array:
    """Rows @ weight + bias in its own dtype, rounded once, as a GEMM with a bias epilogue does."""
    if bias is None:
        return narrow(jnp.matmul)(x, weight)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    y = narrow(partial(jnp.matmul, preferred_element_type=wide))(x, weight)
    return (y + bias.astype(wide)).astype(x.dtype)


def _affine_forward(x, weight, bias, narrow):  # type: ignore[no-untyped-def]
    no_bias = None if bias is None else bias[:0]  # for its dtype
    return checkpoint_name(affine(x, weight, bias, narrow), AFFINE), (x, weight, no_bias)


def _affine_backward(narrow, residuals, dy):  # type: ignore[no-untyped-def]
    (x, weight, no_bias), matmul = residuals, narrow(jnp.matmul)
    wide = jnp.promote_types(dy.dtype, jnp.float32)
    # XLA adds up the devices' behind the product; rounded there, they would be sent so, too.
    of_rows = narrow(partial(jnp.matmul, preferred_element_type=wide)) if divides_rows() else matmul
    dx, dweight = matmul(dy, weight.T), of_rows(x.T, dy).astype(weight.dtype)
    if no_bias is None:
        return dx, dweight, None
    dbias = dy.astype(wide).sum(0).astype(dy.dtype)  # which float16 can overflow, as in torch
    return dx, dweight, dbias.astype(no_bias.dtype)


affine.defvjp(_affine_forward, _affine_backward)


def scale(x: Array, by: float) -> Array:
    """x * by, rounded once: JAX would round the number to x's dtype first."""
    return (x.astype(jnp.promote_types(x.dtype, jnp.float32)) * by).astype(x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def layer_norm(x: Array, weight: Array, bias: Array | None, eps: float, own_moments: bool) -> Array:
    """`own_moments`: made of others than those that the backward pass takes."""
    return _layer_norm_forward(x, weight, bias, eps, own_moments)[0]


def _layer_norm_forward(x, weight, bias, eps, own_moments):  # type: ignore[no-untyped-def]
    mean, variance = jax.lax.platform_dependent(x, cpu=moments, default=moments_in_one_pass)
    rstd = jax.lax.rsqrt(variance + eps)
    own_mean, own_variance = moments(x) if own_moments else (mean, variance)
    y = (x - own_mean) * jax.lax.rsqrt(own_variance + eps) * weight
    biased = None if bias is None else ()
    return y if bias is None else y + bias, (x, weight, biased, mean, rstd)


def _layer_norm_backward(eps, own_moments, residuals, dy):  # type: ignore[no-untyped-def]
    x, weight, biased, mean, rstd = residuals
    rows = tuple(range(dy.ndim - 1))
    normal, dnormal = (x - mean) * rstd, dy * weight
    slope = (dnormal * normal).mean(-1, keepdims=True)
    dx = rstd * (dnormal - dnormal.mean(-1, keepdims=True) - normal * slope)
    return dx, (dy * normal).sum(rows), None if biased is None else dy.sum(rows)


def moments(x: Array) -> tuple[Array, Array]:
    """Mean and variance of (..., D), each (..., 1); E[x^2] - E[x]^2 loses all digits where the mean
    is large."""
    mean = x.mean(-1, keepdims=True)
    return mean, jnp.square(x - mean).mean(-1, keepdims=True)


def moments_in_one_pass(x: Array) -> tuple[Array, Array]:
    """The same, x read once: counts, means and sums of squares are joined (Chan et al. 1979)."""

    def join(left: tuple[Array, ...], right: tuple[Array, ...]) -> tuple[Array, ...]:
        (n, mean, squares), (m, other, other_squares) = left, right
        weight, apart = m / jnp.maximum(n + m, 1), other - mean
        return n + m, mean + apart * weight, squares + other_squares + apart * apart * n * weight

    zero = jnp.zeros((), x.dtype)
    ones, zeros = jnp.ones_like(x), jnp.zeros_like(x)
    n, mean, squares = jax.lax.reduce((ones, x, zeros), (zero,) * 3, join, (x.ndim - 1,))
    return mean[..., None], (squares / n)[..., None]


layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


@partial(recompute_cheap, static_argnums=2)
def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + eps) * weight


def gelu(x: Array, approximate: str) -> Array:
    return widely(partial(jax.nn.gelu, approximate=approximate == "tanh"), x)


def silu(x: Array) -> Array:
    return widely(jax.nn.silu, x)


def widely(function: Callable[[Array], Array], x: Array) -> Array:
    """In float32 inside, rounded once."""

    def kernel(x: Array) -> Array:
        return function(x.astype(jnp.promote_types(x.dtype, jnp.float32))).astype(x.dtype)

    return recompute(kernel)(x)


@jax.custom_vjp
def cross_entropy(logits: Array, targets: Array) -> Array:
    """Logits (..., V) and targets (...) -> (...), in float32 inside."""
    return _cross_entropy_forward(logits, targets)[0]


def _cross_entropy_forward(logits, targets):  # type: ignore[no-untyped-def]
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    log_sums = jax.lax.platform_dependent(
        wide, cpu=partial(jax.nn.logsumexp, axis=-1), default=logsumexp
    )
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1).squeeze(-1)
    return log_sums - chosen.astype(wide.dtype), (logits, targets, log_sums)


def _cross_entropy_backward(residuals, dy):  # type: ignore[no-untyped-def]
    """Softmax less one at the target, in one pass: autodiff would scatter into wide logits."""
    logits, targets, log_sums = residuals
    probs = jnp.exp(logits.astype(dy.dtype) - log_sums[..., None])
    is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
    return ((probs - is_target) * dy[..., None]).astype(logits.dtype), None


cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def logsumexp(x: Array) -> Array:
    """(..., V) -> (...), reading x once: the maximum, and the sum of what is below it, go along
    together. A CPU is faster with one after the other."""

    def join(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
        (top, total), (other_top, other) = left, right
        new = jnp.maximum(top, other_top)
        return new, total * jnp.exp(top - new) + other * jnp.exp(other_top - new)

    zero, lowest = jnp.zeros((), x.dtype), jnp.array(jnp.finfo(x.dtype).min)  # -inf - -inf is NaN
    top, total = jax.lax.reduce((x, jnp.ones_like(x)), (lowest, zero), join, (x.ndim - 1,))
    return top + jnp.log(total)


def split_heads(x_BTHK: Array, ends: tuple[int, ...]) -> list[Array]:
    split = partial(jnp.split, indices_or_sections=ends, axis=2)
    return jax.lax.platform_dependent(x_BTHK, cpu=split, default=partial(cut_heads, ends=ends))


def cut_heads(x_BTHK: Array, ends: tuple[int, ...]) -> list[Array]:
    """Whose derivative is a sum: XLA writes it together with the bias's. A CPU is slow at it."""
    return [x_BTHK[:, :, start:end] for start, end in pairwise((0, *ends, None))]


def scaled_dot_product_attention(
    q: Array, k: Array, v: Array, mask: Array | None = None, *, is_causal: bool
) -> Array:
    """cuDNN's, of (B, T, H, K), asked for by name: left to choose, JAX takes XLA's."""
    how: Any = {"mask": mask, "is_causal": is_causal, "implementation": "cudnn"}
    return jax.nn.dot_product_attention(q, k, v, **how)


def flash_attention(q: Array, k: Array, v: Array, *, interpret: bool = False) -> Array:
    """Causal, of (B, T, H, K) in float32: JAX's kernel in Triton, where cuDNN has none.
    `interpret` runs it on a CPU."""
    from jax.experimental.pallas.ops.gpu import attention  # slow to import, and for a GPU alone

    side, d_head = tile(q.shape[-1]), q.shape[-1]
    sizes = attention.BlockSizes(side, side, side, side, side, side)
    how: Any = {"causal": True, "block_sizes": sizes, "interpret": interpret}
    return attention.mha(q, k, v, None, d_head**-0.5, **how)
