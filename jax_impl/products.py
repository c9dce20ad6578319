"""Matmuls in formats that the device has no units for: operands rounded, products in float32.

What is kept for the backward pass is what float32 keeps: operands are rounded again there.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from lockstep.formats.table import RECIPES, Recipe

from .rounding import draw, quantize

Product = Callable[..., Array]  # of two operands, linear in each
Narrow = Callable[[Product], Product]


def keep(product: Product) -> Product:
    """As the device multiplies."""
    return product


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def rounded_linear(
    recipe: Recipe, x: Array, weight: Array, bias: Array | None = None, key: Array | None = None
) -> Array:
    """Rows (R, in) @ weight (in, out) + bias (out), of rounded operands; and so are the two
    products of its derivative."""
    y = quantize(x, recipe.x, -1) @ quantize(weight, recipe.weight, -2)
    return y if bias is None else y + bias


def _linear_forward(recipe, x, weight, bias, key):  # type: ignore[no-untyped-def]
    # Not by its name: into a function with a derivative of its own no remat policy looks.
    biased = None if bias is None else ()  # a tree without an array: nothing more is kept
    y = rounded_linear.__wrapped__(recipe, x, weight, bias)
    return y, (x, weight, biased, key)


def _linear_backward(recipe, kept, dy):  # type: ignore[no-untyped-def]
    x, weight, biased, key = kept
    draws = None if key is None else draw(key, dy.shape)
    dx = quantize(dy, recipe.dy, -1, draws) @ quantize(weight, recipe.weight, -1).T
    dweight = quantize(x, recipe.x, -2).T @ quantize(dy, recipe.dy, -2, draws)
    return dx, dweight, None if biased is None else dy.sum(0), None


rounded_linear.defvjp(_linear_forward, _linear_backward)


def narrow(recipe: Recipe, product: Product) -> Product:
    """The product of rounded operands, those of its derivative included; of rows and weights with
    `rounded_linear`'s further arguments."""
    if product is jnp.matmul:
        return partial(rounded_linear, recipe)

    def multiply(a: Array, b: Array) -> Array:
        return product(quantize(a, recipe.x, -1), quantize(b, recipe.weight, -2))

    def forward(a, b):  # type: ignore[no-untyped-def]
        return multiply(a, b), (a, b)

    def backward(operands, dy):  # type: ignore[no-untyped-def]
        a, b = operands
        a, b = quantize(a, recipe.x, -2), quantize(b, recipe.weight, -1)
        dy = quantize(dy, recipe.dy, -1)
        (da,) = jax.linear_transpose(lambda a: product(a, b), a)(dy)
        (db,) = jax.linear_transpose(lambda b: product(a, b), b)(dy)
        return da, db

    rounded = jax.custom_vjp(multiply)
    rounded.defvjp(forward, backward)
    return rounded


NARROW: dict[str, Narrow] = {
    "": keep,
    **{name: partial(narrow, recipe) for name, recipe in RECIPES.items()},
}
