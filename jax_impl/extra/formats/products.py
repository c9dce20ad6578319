"""Matmuls in narrow formats: operands rounded, products in float32, or by the device's units.

What is kept for the backward pass is what float32 keeps: operands are rounded again there.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from lockstep.formats.rounding import RoundedOperand
from lockstep.formats.table import Recipe

from ...functional import Product
from .rounding import ROUNDING

NO_SCALES = (None, None, None)  # known before: current scaling takes an operand's own


def times(left: RoundedOperand, right: RoundedOperand) -> Array:
    """The product (M, N) of operands (M, K) and (K, N)."""
    a, b = left.numbers, right.numbers
    if left.scale is None or right.scale is None:
        return a @ b
    return jnp.matmul(a, b, preferred_element_type=jnp.float32) * left.scale * right.scale


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def rounded_linear(
    recipe: Recipe,
    x: Array,
    weight: Array,
    bias: Array | None = None,
    scales: Array | None = None,
) -> Array:
    """Rows (R, in) @ weight (in, out) + bias (out), of rounded operands; and so are the two
    products of its derivative. That of the scales is the amaxes."""
    of_x, of_weight, _ = NO_SCALES if scales is None else scales
    own = partial(ROUNDING.operand, native=recipe.native)
    y = times(own(x, recipe.x, of_x), own(weight, recipe.weight, of_weight))
    return y if bias is None else y + bias


def _linear_forward(recipe, x, weight, bias, scales):  # type: ignore[no-untyped-def]
    # Not by its name: into a function with a derivative of its own no remat policy looks.
    biased = None if bias is None else ()  # a tree without an array: nothing more is kept
    y = rounded_linear.__wrapped__(recipe, x, weight, bias, scales)
    return y, (x, weight, biased, scales)


def _linear_backward(recipe, kept, dy):  # type: ignore[no-untyped-def]
    x, weight, biased, scales = kept
    of_x, of_weight, of_dy = NO_SCALES if scales is None else scales
    own = partial(ROUNDING.operand, native=recipe.native)
    rounded = own(dy, recipe.dy, of_dy)
    dx = times(rounded, own(weight, recipe.weight, of_weight).mT)
    dweight = times(own(x, recipe.x, of_x).mT, rounded)
    sizes = [] if scales is None else [jnp.abs(each).max() for each in (x, weight, dy)]
    amaxes = jnp.stack(sizes).astype(scales.dtype) if sizes else None
    if amaxes is not None:  # a known scale clips an infinity, which no gradient would show
        dweight += 0 * amaxes.sum()
    return dx, dweight, None if biased is None else dy.sum(0), amaxes


rounded_linear.defvjp(_linear_forward, _linear_backward)


def rounded_product(recipe: Recipe) -> Product:
    """`functional.linear` of rounded operands, those of its derivative included."""
    return lambda x, weight, bias: rounded_linear(recipe, x, weight, bias)


def rounded_einsum(recipe: Recipe) -> Callable[..., Array]:
    """`jnp.einsum` of two operands, which are rounded; and so are those of its derivative."""

    def einsum(subscripts: str, a: Array, b: Array) -> Array:
        return rounded_by_hand(recipe, partial(jnp.einsum, subscripts))(a, b)

    return einsum


def rounded_by_hand(recipe: Recipe, product: Callable[[Array, Array], Array]) -> Callable:
    """A product that is linear in each of two operands, of rounded operands."""

    def multiply(a: Array, b: Array) -> Array:
        return product(ROUNDING.quantize(a, recipe.x), ROUNDING.quantize(b, recipe.weight))

    def forward(a: Array, b: Array) -> tuple[Array, tuple[Array, Array]]:
        return multiply(a, b), (a, b)

    def backward(operands: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
        a, b = operands
        a, b = ROUNDING.quantize(a, recipe.x), ROUNDING.quantize(b, recipe.weight)
        dy = ROUNDING.quantize(dy, recipe.dy)
        (da,) = jax.linear_transpose(lambda a: product(a, b), a)(dy)
        (db,) = jax.linear_transpose(lambda b: product(a, b), b)(dy)
        return da, db

    rounded = jax.custom_vjp(multiply)
    rounded.defvjp(forward, backward)
    return rounded
