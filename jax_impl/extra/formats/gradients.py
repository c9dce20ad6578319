"""Gradients in a dtype of their own: a policy's `grads`.

A product is the policy's. Its derivative is that of a policy whose matmuls compute in that dtype.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from ...functional import linear
from ...remat import AFFINE
from .products import Product


def backward_in(kind: str, product: Product) -> Product:
    """The product; what comes back, what was kept and what they make together are in `kind`."""
    whole = _of_rows if product is jnp.matmul else product

    def forward(*operands: Any) -> tuple[Array, Any]:
        return whole(*operands), operands

    def backward(operands: Any, dy: Array) -> Any:
        narrow = jax.tree.map(lambda x: x.astype(kind), operands)
        _, turned = jax.vjp(whole, *narrow)
        return jax.tree.map(lambda x, dx: dx.astype(x.dtype), operands, turned(dy.astype(kind)))

    run = jax.custom_vjp(whole)
    run.defvjp(forward, backward)
    return run


def _of_rows(x: Array, weight: Array, bias: Array | None = None, *of_formats: None) -> Array:
    """Named: into a function with a derivative of its own no remat policy looks."""
    return checkpoint_name(linear(x, weight, bias), AFFINE)
