"""Rows times weights in float32 by oneDNN. torch asks MKL, which on a CPU of another maker than its
own does without AVX-512: decision 35."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lockstep import provenance

from . import rounding

# x (R, in), weight (out, in), bias (out), and what is fused behind it; only some builds have it.
LINEAR = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def has_float32_library(device: torch.device) -> bool:
    """Whether it beats what torch asks by itself."""
    cpu = provenance.cpu()
    beats = "AMD" in (cpu["model"] or "") and "avx512f" in (cpu["flags"] or ())
    return device.type == "cpu" and beats and LINEAR is not None


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    assert LINEAR
    return LINEAR(x, weight, bias, "none", [], "")


class Operands(torch.autograd.Function):
    """x (R, in), weight (out, in), bias (out) -> a gradient's place (R, out), of no memory.

    Keeps what the derivative of the product needs, before it is made: what recomputes them for the
    backward pass need not make the last one.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.new_empty(()).expand(len(x), len(weight))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), (x, weight), wanted = grads, ctx.saved_tensors, ctx.needs_input_grad
        return (
            multiply(dy, weight.mT) if wanted[0] else None,
            multiply(dy.mT, x.mT) if wanted[1] else None,
            dy.sum(0) if wanted[2] else None,
        )


class Product(torch.autograd.Function):
    """x @ weight.T + bias, its gradient passed on to the place."""

    @staticmethod
    def forward(ctx: Any, place: Tensor, *operands: Any) -> Tensor:
        return multiply(*operands)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None, None, None


def multiply_by_onednn(product: rounding.Product) -> rounding.Product:
    """`F.linear`, its sums in another order."""

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        operands = x, weight, bias
        constants = (each if each is None else each.detach() for each in operands)
        return Product.apply(Operands.apply(*operands), *constants)

    return linear


if LINEAR:
    register_flop_formula(LINEAR)(lambda x, weight, *rest, **how: 2 * x.numel() * weight[0])
