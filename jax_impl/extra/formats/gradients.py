"""Gradients in a dtype of their own: a policy's `grads`.

A product is the policy's. Its derivative is that of a policy whose matmuls compute in that dtype.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from ...functional import Product, linear
from ...remat import AFFINE


def linear_backward_in(kind: str) -> Product:
    """`functional.linear`, its derivative in the dtype `kind`."""

    def named(x: Array, weight: Array, bias: Array | None) -> Array:
        # Named: into a function with a derivative of its own no remat policy looks.
        return checkpoint_name(linear(x, weight, bias), AFFINE)

    return backward_in(kind, named)


def einsum_backward_in(kind: str) -> Callable[..., Array]:
    """`jnp.einsum`, its derivative in the dtype `kind`."""
    return lambda subscripts, a, b: backward_in(kind, partial(jnp.einsum, subscripts))(a, b)


def backward_in(kind: str, product: Callable[..., Array]) -> Callable[..., Array]:
    """The product; what comes back, what was kept and what they make together are in `kind`."""

    def forward(*operands: Any) -> tuple[Array, Any]:
        return product(*operands), operands

    def backward(operands: Any, dy: Array) -> Any:
        narrow = jax.tree.map(lambda x: x.astype(kind), operands)
        _, transposed = jax.vjp(product, *narrow)
        return jax.tree.map(lambda x, dx: dx.astype(x.dtype), operands, transposed(dy.astype(kind)))

    run = jax.custom_vjp(lambda *operands: product(*operands))
    run.defvjp(forward, backward)
    return run
