"""Gradients in a dtype of their own: a policy's `grads`.

A product is the policy's. Its derivative is that of a policy whose matmuls compute in that dtype.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...model import Product


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


def linear_backward_in(kind: str) -> Product:
    """`F.linear`, its derivative in the dtype `kind`."""
    dtype = getattr(torch, kind)
    return lambda x, weight, bias: ProductBackwardIn.apply(dtype, x, weight.mT, bias)


def matmul_backward_in(kind: str) -> Callable[..., Tensor]:
    """`torch.matmul`, its derivative in the dtype `kind`."""
    dtype = getattr(torch, kind)
    return lambda a, b: ProductBackwardIn.apply(dtype, a, b, None)
