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


def keep(product: Product) -> Product:
    """As the device multiplies."""
    return product


class RoundedProduct(torch.autograd.Function):
    """a (..., M, K) @ b (..., K, N) + bias (N), of rounded operands; and so are the two products of
    its derivative, in autograd's own layouts."""

    @staticmethod
    def forward(
        ctx: Any, recipe: Recipe, a: Tensor, b: Tensor, bias: Tensor | None, key: Key | None
    ) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.recipe, ctx.key = recipe, key
        a, b = quantize(a, recipe.x, -1), quantize(b, recipe.weight, -2)
        return a @ b if bias is None else torch.addmm(bias, a, b)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), (a, b), recipe = grads, ctx.saved_tensors, ctx.recipe
        draws = None
        if ctx.key is not None:
            draws = draw(ctx.key, dy.shape, dy.device, rank() * dy.numel())
        da = quantize(dy, recipe.dy, -1, draws) @ quantize(b, recipe.weight, -1).mT
        db = (quantize(dy, recipe.dy, -2, draws).mT @ quantize(a, recipe.x, -2)).mT
        dbias = dy.sum(0) if ctx.needs_input_grad[3] else None
        return None, da, db, dbias, None


def narrow(recipe: Recipe, product: Product) -> Product:
    """The product of rounded operands, those of its derivative included."""

    def linear(
        x: Tensor, weight: Tensor, bias: Tensor | None = None, key: Key | None = None
    ) -> Tensor:
        return RoundedProduct.apply(recipe, x, weight.mT, bias, key)

    def matmul(a: Tensor, b: Tensor) -> Tensor:
        return RoundedProduct.apply(recipe, a, b, None, None)

    rounded: dict[Product, Product] = {F.linear: linear, torch.matmul: matmul}
    return rounded[product]


NARROW: dict[str, Narrow] = {
    "": keep,
    **{name: partial(narrow, recipe) for name, recipe in RECIPES.items()},
}
