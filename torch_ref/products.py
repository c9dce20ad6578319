"""Matmuls in narrow formats: operands rounded, products in float32, or by units for fp8.

What is kept for the backward pass is what float32 keeps: operands are rounded again there.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.formats.table import E4M3, E5M2, NATIVE, RECIPES, Format, Recipe
from lockstep.model.threefry import Key

from . import onednn
from .processes import largest, rank
from .rounding import Draws, draw, power_of_two, quantize

Product = Callable[..., Tensor]  # F.linear or torch.matmul
Narrow = Callable[[Product], Product]
FLOAT8 = {E4M3.exponent: torch.float8_e4m3fn, E5M2.exponent: torch.float8_e5m2}
NO_SCALES = (None, None, None)  # known before: current scaling takes an operand's own


def keep(product: Product) -> Product:
    """As the device multiplies."""
    return product


def multiply(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a (..., M, K) @ b (..., K, N) + bias (N), by the library that is fast here."""
    whole = a.ndim == 2 and a.dtype == torch.float32 and not torch.compiler.is_compiling()
    if whole and onednn.has_float32_library(a.device):
        return onednn.multiply(a, b.mT, bias)
    return a @ b if bias is None else torch.addmm(bias, a, b)


class Rounded(NamedTuple):
    """A product's operand: as float32, or as the device's own numbers and their scale."""

    numbers: Tensor
    scale: Tensor | None = None

    @classmethod
    def of(
        cls,
        x: Tensor,
        to: Format | None,
        axis: int,
        draws: Draws | None = None,
        scale: Tensor | None = None,
        *,
        native: bool = False,
    ) -> "Rounded":
        """x (M, N), as `quantize` has it."""
        if not native or to is None:
            return cls(quantize(x, to, axis, draws, scale))
        if scale is None:
            scale = power_of_two(largest(x.abs().amax()), to.scale, to.largest)
        fitting = (x / scale).clamp(-to.largest, to.largest)  # past it e4m3fn has NaN alone
        return cls(fitting.to(FLOAT8[to.exponent]), scale)

    @property
    def mT(self) -> "Rounded":
        return Rounded(self.numbers.mT, self.scale)

    def times(self, other: "Rounded") -> Tensor:
        if self.scale is None or other.scale is None:
            return multiply(self.numbers, other.numbers)
        a, b = _by_sixteens(self.numbers), _by_sixteens(other.numbers.mT).mT  # as cuBLAS takes them
        y = torch._scaled_mm(a, b, self.scale, other.scale, out_dtype=torch.float32)
        return y[: self.numbers.shape[0], : other.numbers.shape[1]]

    def affine(self, other: "Rounded", bias: Tensor | None) -> Tensor:
        if self.scale is None:
            return multiply(self.numbers, other.numbers, bias)
        y = self.times(other)
        return y if bias is None else y + bias


def _by_sixteens(x: Tensor) -> Tensor:
    """Row by row in memory; zeros up to the next multiple of 16 add nothing to a product."""
    rows, columns = (-n % 16 for n in x.shape)
    x = x.contiguous()
    filled = (0, columns, 0, rows)
    return F.pad(x.view(torch.uint8), filled).view(x.dtype) if any(filled) else x


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
        own = partial(Rounded.of, native=recipe.native)
        x, weight = own(a, recipe.x, -1, None, of_a), own(b, recipe.weight, -2, None, of_b)
        return x.affine(weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), (a, b, scales), recipe = grads, ctx.saved_tensors, ctx.recipe
        draws = None
        if ctx.key is not None:
            draws = draw(ctx.key, dy.shape, dy.device, rank() * dy.numel())
        of_a, of_b, of_dy = NO_SCALES if scales is None else scales
        own = partial(Rounded.of, native=recipe.native)
        round_dy = partial(own, dy, recipe.dy, draws=draws, scale=of_dy)
        da = round_dy(axis=-1).times(own(b, recipe.weight, -1, None, of_b).mT)
        db = round_dy(axis=-2).mT.times(own(a, recipe.x, -2, None, of_a)).mT
        sizes = [] if scales is None else [each.abs().amax() for each in (a, b, dy)]
        amaxes = torch.stack(sizes).to(scales) if sizes else None
        if amaxes is not None:  # a known scale clips an infinity, which no gradient would show
            db += 0 * amaxes.sum()
        dbias = dy.sum(0) if ctx.needs_input_grad[3] else None
        return None, da, db, dbias, None, amaxes


def rounded_linear(
    recipe: Recipe,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    key: Key | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    return RoundedProduct.apply(recipe, x, weight.mT, bias, key, scales)


def rounded_matmul(recipe: Recipe, a: Tensor, b: Tensor) -> Tensor:
    return RoundedProduct.apply(recipe, a, b, None, None, None)


ROUNDED: dict[Product, Product] = {F.linear: rounded_linear, torch.matmul: rounded_matmul}


def narrow(recipe: Recipe, product: Product) -> Product:
    """The product of rounded operands, those of its derivative included."""
    return partial(ROUNDED[product], recipe)


NARROW: dict[str, Narrow] = {
    "": keep,
    **{name: partial(narrow, recipe) for name, recipe in (RECIPES | NATIVE).items()},
}
