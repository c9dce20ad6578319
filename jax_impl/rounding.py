"""Matmuls in a format that the device has no units for: operands rounded, products in float32."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from lockstep.model.tf32 import HALF, MASK

Product = Callable[..., Array]  # of two operands, linear in each
Narrow = Callable[[Product], Product]


def keep(product: Product) -> Product:
    """As the device multiplies."""
    return product


def round_to_tf32(x: Array) -> Array:
    """float32 of any shape -> float32: see `lockstep.model.tf32`."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    rounded = (bits + jnp.uint32(HALF)) & jnp.uint32(MASK)
    return jnp.where(jnp.isnan(x), x, jax.lax.bitcast_convert_type(rounded, jnp.float32))


def narrow_to_tf32(product: Product) -> Product:
    """The same of rounded operands; and so are the two products of its derivative."""

    @jax.custom_vjp
    def narrow(a: Array, b: Array) -> Array:
        return product(round_to_tf32(a), round_to_tf32(b))

    def forward(a, b):  # type: ignore[no-untyped-def]
        # Not by `narrow`: into a function with a derivative of its own no remat policy looks.
        return product(round_to_tf32(a), round_to_tf32(b)), (a, b)

    def backward(operands, dy):  # type: ignore[no-untyped-def]
        a, b, dy = map(round_to_tf32, (*operands, dy))
        (da,) = jax.linear_transpose(lambda a: product(a, b), a)(dy)
        (db,) = jax.linear_transpose(lambda b: product(a, b), b)(dy)
        return da, db

    narrow.defvjp(forward, backward)
    return narrow


NARROW: dict[str, Narrow] = {"": keep, "tf32": narrow_to_tf32}
