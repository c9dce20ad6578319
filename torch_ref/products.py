"""Matmuls in formats that the device has no units for: operands rounded, products in float32.

What is kept for the backward pass is what float32 keeps: operands are rounded again there.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.formats.table import RECIPES, Recipe
from lockstep.model.threefry import Key

from .processes import rank
from .rounding import draw, quantize

Product = Callable[..., Tensor]  # F.linear or torch.matmul
Narrow = Callable[[Product], Product]
NO_SCALES = (None, None, None)  # known before: current scaling takes an operand's own


def keep(product: Product) -> Product:
    """As the device multiplies."""
    return product


class RoundedProduct(torch.autograd.Function):
    """a (..., M, K) @ b (..., K, N) + bias (N), of rounded operands; and so are the two products of
    its derivative, in autograd's own layouts. That of the scales is the amaxes."""

    @staticmethod
    def forward(
        ctx: Any,
        recipe: Recipe,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        key: Key | None,
        scales: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(a, b, scales)
        ctx.recipe, ctx.key = recipe, key
        of_a, of_b, _ = NO_SCALES if scales is None else scales
        a, b = quantize(a, recipe.x, -1, None, of_a), quantize(b, recipe.weight, -2, None, of_b)
        return a @ b if bias is None else torch.addmm(bias, a, b)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), (a, b, scales), recipe = grads, ctx.saved_tensors, ctx.recipe
        draws = None
        if ctx.key is not None:
            draws = draw(ctx.key, dy.shape, dy.device, rank() * dy.numel())
        of_a, of_b, of_dy = NO_SCALES if scales is None else scales
        round_dy = partial(quantize, dy, recipe.dy, draws=draws, scale=of_dy)
        da = round_dy(axis=-1) @ quantize(b, recipe.weight, -1, None, of_b).mT
        db = (round_dy(axis=-2).mT @ quantize(a, recipe.x, -2, None, of_a)).mT
        sizes = [] if scales is None else [each.abs().amax() for each in (a, b, dy)]
        amaxes = torch.stack(sizes).to(scales) if sizes else None
        dbias = dy.sum(0) if ctx.needs_input_grad[3] else None
        return None, da, db, dbias, None, amaxes


def narrow(recipe: Recipe, product: Product) -> Product:
    """The product of rounded operands, those of its derivative included."""

    def linear(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        key: Key | None = None,
        scales: Tensor | None = None,
    ) -> Tensor:
        return RoundedProduct.apply(recipe, x, weight.mT, bias, key, scales)

    def matmul(a: Tensor, b: Tensor) -> Tensor:
        return RoundedProduct.apply(recipe, a, b, None, None, None)

    rounded: dict[Product, Product] = {F.linear: linear, torch.matmul: matmul}
    return rounded[product]


NARROW: dict[str, Narrow] = {
    "": keep,
    **{name: partial(narrow, recipe) for name, recipe in RECIPES.items()},
}
