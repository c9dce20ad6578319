"""Gradients in a dtype of their own: a policy's `grads`.

A product is the policy's. Its derivative is that of a policy whose matmuls compute in that dtype.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .products import Product


class ProductBackwardIn(torch.autograd.Function):
    """a (..., M, K) @ b (..., K, N) + bias (N)."""

    @staticmethod
    def forward(ctx: Any, kind: torch.dtype, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(a, b, bias)
        ctx.kind = kind
        return a @ b if bias is None else torch.addmm(bias, a, b)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        a, b, bias = ctx.saved_tensors
        dy, left, right = (x.to(ctx.kind) for x in (*grads, a, b))
        da, db = dy @ right.mT, (dy.mT @ left).mT
        dbias = None if bias is None else dy.sum(0).to(bias.dtype)
        return None, da.to(a.dtype), db.to(b.dtype), dbias


def backward_in(kind: str, product: Product) -> Product:
    """The product; what comes back, what was kept and what they make together are in `kind`."""
    dtype = getattr(torch, kind)

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return ProductBackwardIn.apply(dtype, x, weight.mT, bias)

    def matmul(a: Tensor, b: Tensor) -> Tensor:
        return ProductBackwardIn.apply(dtype, a, b, None)

    run: dict[Product, Product] = {F.linear: linear, torch.matmul: matmul}
    return run[product]
