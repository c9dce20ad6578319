"""Matmuls in narrow formats: operands rounded, products in float32, or by the device's units.

What is kept for the backward pass is what float32 keeps: operands are rounded again there.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.formats.rounding import RoundedOperand
from lockstep.formats.table import Recipe

from ...model import Product
from .rounding import Rounding

NO_SCALES = (None, None, None)  # known before: current scaling takes an operand's own
OF_ONE_PROCESS = Rounding()


def times(left: RoundedOperand, right: RoundedOperand, bias: Tensor | None = None) -> Tensor:
    """The product (M, N) of operands (M, K) and (K, N), plus bias (N)."""
    a, b = left.numbers, right.numbers
    if left.scale is None or right.scale is None:
        return a @ b if bias is None else torch.addmm(bias, a, b)
    size = len(a), b.shape[1]
    a, b = _row_by_row(a), _row_by_row(b.mT).mT  # as cuBLAS takes them
    # Copied: an H200's cuBLAS refuses a number inside a larger tensor, at a multiple of 4 bytes,
    # and takes one that has memory of its own.
    scales = left.scale.clone(), right.scale.clone()
    y = torch._scaled_mm(a, b, *scales, out_dtype=torch.float32)[: size[0], : size[1]]
    return y if bias is None else y + bias


def _row_by_row(x: Tensor) -> Tensor:
    """Lays a matrix out row by row; zeros up to the next multiple of 16 add nothing to a
    product."""
    kind, x = x.dtype, x.contiguous().view(torch.uint8)
    rows, columns = (-n % 16 for n in x.shape)
    x = F.pad(x, (0, columns, 0, rows)) if rows or columns else x
    return x.view(kind)


class RoundedProduct(torch.autograd.Function):
    """a (..., M, K) @ b (..., K, N) + bias (N), of rounded operands; and so are the two products of
    its derivative, in autograd's own layouts. The gradient of the scales is the amaxes."""

    @staticmethod
    def forward(
        ctx: Any,
        recipe: Recipe,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        scales: Tensor | None,
        rounding: Rounding,
    ) -> Tensor:
        ctx.save_for_backward(a, b, scales)
        ctx.recipe, ctx.rounding = recipe, rounding
        of_a, of_b, _ = NO_SCALES if scales is None else scales
        own = partial(rounding.operand, native=recipe.native)
        x, weight = own(a, recipe.x, of_a), own(b, recipe.weight, of_b)
        return times(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), (a, b, scales), recipe = grads, ctx.saved_tensors, ctx.recipe
        of_a, of_b, of_dy = NO_SCALES if scales is None else scales
        own = partial(ctx.rounding.operand, native=recipe.native)
        rounded = own(dy, recipe.dy, of_dy)
        da = times(rounded, own(b, recipe.weight, of_b).mT)
        db = times(rounded.mT, own(a, recipe.x, of_a)).mT
        sizes = [] if scales is None else [each.abs().amax() for each in (a, b, dy)]
        amaxes = torch.stack(sizes).to(scales) if sizes else None
        if amaxes is not None:  # a known scale clips an infinity, which no gradient would show
            db += 0 * amaxes.sum()
        dbias = dy.sum(0) if ctx.needs_input_grad[3] else None
        return None, da, db, dbias, amaxes, None


def rounded_linear(
    recipe: Recipe,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    scales: Tensor | None = None,
    rounding: Rounding = OF_ONE_PROCESS,
) -> Tensor:
    """`F.linear` of rounded operands, those of its derivative included."""
    return RoundedProduct.apply(recipe, x, weight.mT, bias, scales, rounding)


def rounded_product(recipe: Recipe, rounding: Rounding = OF_ONE_PROCESS) -> Product:
    """`F.linear` of rounded operands, as a part of a model takes it."""
    return lambda x, weight, bias: rounded_linear(recipe, x, weight, bias, rounding=rounding)


def rounded_matmul(recipe: Recipe, rounding: Rounding) -> Callable[..., Tensor]:
    """`torch.matmul` of rounded operands, those of its derivative included."""
    return lambda a, b: RoundedProduct.apply(recipe, a, b, None, None, rounding)
