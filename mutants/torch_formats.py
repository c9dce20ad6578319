"""Mutants of narrow formats in torch: those of both twins, and those of several processes."""

from typing import Any

import torch
from torch import Tensor

import torch_ref.twin
from lockstep.formats.table import E4M3
from mutants.narrow_formats import bugs
from mutants.patch import Plant, after, assign, wrap
from torch_ref.extra import rules
from torch_ref.extra.formats import products, rounding
from torch_ref.extra.formats.delayed import Delayed


def look_alone(self: Any, *args: Any) -> None:
    """Looks in one process for what all processes share."""
    self.rounding = rounding.Rounding()


def scale_copy_otherwise(context: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The weight's transposed copy has the gradient's scale."""
    (a, b, _), recipe, own = context.saved_tensors, context.recipe, context.rounding
    least = own.power_of_two(dy.abs().amax(), E4M3.largest)
    da = own.quantize(dy, recipe.dy, -1) @ own.round_to(b, E4M3, least).mT
    db = (own.quantize(dy, recipe.dy, -2).mT @ own.quantize(a, recipe.x, -2)).mT
    return None, da, db, dy.sum(0) if context.needs_input_grad[3] else None, None, None, None


own_backward = assign(products.RoundedProduct, "backward", staticmethod(scale_copy_otherwise))
of_skipped_step = wrap(
    Delayed,
    "update_amaxes",
    lambda right, self, found, scale, skipped: right(self, found, scale, skipped=False),
)

BUGS: dict[str, Plant] = {
    **bugs(torch_ref, torch.roll, lambda one, other: other, own_backward, of_skipped_step),
    "amaxes-of-one-rank": after(Delayed, "__init__", look_alone),
    "draws-of-one-rank": assign(rules, "rank", lambda: 0),
    "scales-of-one-rank": after(rules.Rules, "__init__", look_alone),
}
