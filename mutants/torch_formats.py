"""Mutants of narrow formats: the field's own mistakes."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lockstep.config import policy
from lockstep.formats.table import E4M3, RECIPES, Format
from mutants.patch import Plant, assign, wrap
from torch_ref import precision, products, rounding


def with_recipe(name: str, **formats: Format) -> Plant:
    """A policy's operands in other formats."""
    recipe = replace(RECIPES[name], **formats)

    def plant() -> None:
        precision.OF_ROWS[name] = partial(products.narrow, recipe)

    return plant


def keep_last_scale() -> Plant:
    """Each tensor is rounded under the scale of the one before it."""
    last: list[Tensor] = []

    def stale(right: Callable, *given: Any) -> Tensor:
        last.append(right(*given))
        return last.pop(0) if len(last) > 1 else last[0]

    return wrap(rounding, "power_of_two", stale)


def forget_scale(right: Callable, x: Tensor, to: Format, scale: Tensor | None = None,
                 *draws: Any) -> Tensor:  # fmt: skip
    """The product is not multiplied by its operands' scales."""
    rounded = right(x, to, scale, *draws)
    return rounded if scale is None else rounded / scale


def scale_copy_otherwise(context: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The weight's transposed copy has the gradient's scale."""
    (a, b), recipe, quantize = context.saved_tensors, context.recipe, products.quantize
    least = rounding.power_of_two(dy.abs().amax(), "up", E4M3.largest)
    copy = rounding.round_to(b, E4M3, least)
    da = quantize(dy, recipe.dy, -1) @ copy.mT
    db = (quantize(dy, recipe.dy, -2).mT @ quantize(a, recipe.x, -2)).mT
    return None, da, db, dy.sum(0) if context.needs_input_grad[3] else None, None


def scale_by_largest_block(right: Callable, x: Tensor, sizes: Tensor, *rest: Any) -> Tensor:
    """All blocks of a tensor have one scale, under which small ones become zero."""
    return right(x, sizes.max().expand_as(sizes), *rest)


BUGS: dict[str, Plant] = {
    "e4m3-gradients": with_recipe("fp8", dy=E4M3),
    "scale-of-another-tensor": keep_last_scale(),
    "output-not-scaled": wrap(rounding, "round_to", forget_scale),
    "copy-with-another-scale": assign(
        products.RoundedProduct, "backward", staticmethod(scale_copy_otherwise)
    ),
    "block-rounded-to-zero": wrap(rounding, "_quantize_twice", scale_by_largest_block),
    # floor(x) and never the number above it
    "never-rounded-up": wrap(products, "draw", lambda right, *args: torch.ones_like(right(*args))),
    # a generator without its state: all draws are zero, and every number goes up
    "draws-of-zero": wrap(products, "draw", lambda right, *args: torch.zeros_like(right(*args))),
    "first-layer-in-fp8": wrap(policy, "outside", lambda right, name, modules: (
        not name.startswith("blocks.0.") or name.endswith(".attend")) and right(name, modules)),
}  # fmt: skip
