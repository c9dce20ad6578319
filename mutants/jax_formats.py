"""Planted bugs of narrow formats in JAX, beside those of `narrow_formats`."""

from typing import Any

from lockstep.formats.table import E4M3
from lockstep.parity.bug import Bug
from mutants import torch_formats
from mutants.declare import Declare, replaces, wraps
from mutants.patch import Later, Plant

delayed, products = (
    Later("jax_impl.extra.formats.delayed"),
    Later("jax_impl.extra.formats.products"),
)
jnp, rounding = Later("jax.numpy"), Later("jax_impl.extra.formats.rounding")

Array = Any
BUGS: dict[str, Bug] = {}
bug = Declare("jax", BUGS)


@bug.same(torch_formats.BUGS)
def copy_with_another_scale() -> Plant:
    def backward(recipe: Any, kept: Any, dy: Array) -> tuple[Array | None, ...]:
        (x, weight, biased, *_), own = kept, rounding.ROUNDING
        least = own.power_of_two(jnp.abs(dy).max(), E4M3.largest)
        dx = own.quantize(dy, recipe.dy) @ own.round_to(weight, E4M3, least).T
        dweight = own.quantize(x, recipe.x).T @ own.quantize(dy, recipe.dy)
        return dx, dweight, None if biased is None else dy.sum(0), None

    return lambda: products.rounded_linear.defvjp(products._linear_forward, backward)


@bug.same(torch_formats.BUGS)
@replaces(delayed, "join")
def amaxes_of_last_micro_batch(found):
    return {name: amaxes[-1] for name, amaxes in found.items()}


@bug.same(torch_formats.BUGS)
@wraps(delayed, "Delayed.update_amaxes")
def amaxes_of_skipped_step(right, self, state, scale, finite, *found):
    return right(self, state, scale, jnp.array(True), *found)
