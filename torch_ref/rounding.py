"""Matmuls in a format that the device has no units for: operands rounded, products in float32."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.model.tf32 import HALF, MASK

Product = Callable[..., Tensor]  # F.linear or torch.matmul
Narrow = Callable[[Product], Product]


def keep(product: Product) -> Product:
    """As the device multiplies."""
    return product


def round_to_tf32(x: Tensor) -> Tensor:
    """float32 of any shape -> float32: see `lockstep.model.tf32`."""
    rounded = (x.view(torch.int32) + HALF) & (MASK - 2**32)  # torch adds no unsigned numbers
    return torch.where(x.isnan(), x, rounded.view(torch.float32))


class Tf32Product(torch.autograd.Function):
    """a (..., M, K) @ b (..., K, N) + bias (N), of rounded operands; and so are the two products of
    its derivative, in autograd's own layouts."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(a, b)
        a, b = round_to_tf32(a), round_to_tf32(b)
        return a @ b if bias is None else torch.addmm(bias, a, b)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        dy = round_to_tf32(grads[0])
        a, b = map(round_to_tf32, ctx.saved_tensors)
        dbias = grads[0].sum(0) if ctx.needs_input_grad[2] else None
        return dy @ b.mT, (dy.mT @ a).mT, dbias


def narrow_to_tf32(product: Product) -> Product:
    """The same of rounded operands; and so are the two products of its derivative."""

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return Tf32Product.apply(x, weight.mT, bias)

    def matmul(a: Tensor, b: Tensor) -> Tensor:
        return Tf32Product.apply(a, b, None)

    emulated: dict[Product, Product] = {F.linear: linear, torch.matmul: matmul}
    return emulated[product]


NARROW: dict[str, Narrow] = {"": keep, "tf32": narrow_to_tf32}
