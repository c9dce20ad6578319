"""Mutants of narrow formats in JAX: those of both twins."""

from typing import Any

import jax.numpy as jnp
from jax import Array

import jax_impl.twin
from jax_impl.extra.formats import products
from jax_impl.extra.formats.delayed import Delayed
from jax_impl.extra.formats.rounding import ROUNDING
from lockstep.formats.table import E4M3
from mutants.narrow_formats import bugs
from mutants.patch import Plant, wrap


def scale_copy_otherwise(recipe: Any, kept: Any, dy: Array) -> tuple[Array | None, ...]:
    """The weight's transposed copy has the gradient's scale."""
    (x, weight, biased, *_), own = kept, ROUNDING
    least = own.power_of_two(jnp.abs(dy).max(), E4M3.largest)
    dx = own.quantize(dy, recipe.dy, -1) @ own.round_to(weight, E4M3, least).T
    dweight = own.quantize(x, recipe.x, -2).T @ own.quantize(dy, recipe.dy, -2)
    return dx, dweight, None if biased is None else dy.sum(0), None, None


def own_backward() -> None:
    products.rounded_linear.defvjp(products._linear_forward, scale_copy_otherwise)


def join_last(found: dict[str, Array]) -> dict[str, Array]:
    return {name: amaxes[-1] for name, amaxes in found.items()}


of_skipped_step = wrap(
    Delayed,
    "update_amaxes",
    lambda right, self, state, scale, finite, *found: right(
        self, state, scale, jnp.array(True), *found
    ),
)

BUGS: dict[str, Plant] = {
    f"{name}-in-jax": plant
    for name, plant in bugs(jax_impl, jnp.roll, join_last, own_backward, of_skipped_step).items()
}
