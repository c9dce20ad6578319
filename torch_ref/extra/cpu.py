"""Products by oneDNN, and attention in blocks: faster on some CPUs than torch's own (decision 35).

float32: torch asks MKL, which on a CPU that is not Intel's does without AVX-512. Attention in
bfloat16: torch's fused kernel multiplies without the units for bfloat16.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lockstep.model.attention import block_edges, query_blocks

from .. import remat

LIBRARY = "onednn"
# x (R, in), weight (out, in), bias (out), and what is fused behind it; only some builds have it.
LINEAR = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if torch.compiler.is_compiling():
        return torch.ops.lockstep.linear(x, weight, bias)
    return call(x, weight, bias)


def call(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    assert LINEAR
    return LINEAR(x, weight, bias, "none", [], "")


def shaped(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(len(x), len(weight))


# What the compiler calls and does not look into: the operator itself it wants with packed weights.
OPAQUE = torch.library.Library("lockstep", "DEF")
OPAQUE.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
OPAQUE.impl("linear", call, "CPU")
torch.library.register_fake("lockstep::linear", shaped, lib=OPAQUE)


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


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, its sums in another order."""
    operands = x, weight, bias
    constants = (each if each is None else each.detach() for each in operands)
    return Product.apply(Operands.apply(*operands), *constants)


if LINEAR:
    remat.WEIGHT_MATMULS |= {LINEAR.default, torch.ops.lockstep.linear.default}
    register_flop_formula(LINEAR)(lambda x, weight, *rest, **how: 2 * x.numel() * weight[0])


class InBlocks(torch.autograd.Function):
    """Causal attention of q, k, v (B, H, T, K), each block of queries without the keys behind it;
    the backward pass computes a block's scores again."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.bfloat16)  # as autocast does
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        parts = [probabilities(q[block], k[keys]).to(v.dtype) @ v[keys] for block, keys in cuts(q)]
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        (dy,), (q, k, v) = grads, ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for block, keys in cuts(q):
            probs = probabilities(q[block], k[keys])
            dprobs = (dy[block] @ v[keys].mT).to(probs.dtype)
            dscores = torch._softmax_backward_data(dprobs, probs, -1, probs.dtype)
            dscores = dscores.mul_(q.shape[-1] ** -0.5).to(q.dtype)
            dv[keys] += probs.to(v.dtype).mT @ dy[block]
            dq[block] = dscores @ k[keys]
            dk[keys] += dscores.mT @ q[block]
        return dq, dk, dv


def cuts(q: Tensor) -> list[tuple[Any, Any]]:
    """Yields each block of queries, and the keys that it sees."""
    edges, whole = block_edges(q.shape[2], query_blocks(q.shape[2])), slice(None)
    return [((..., slice(*edge), whole), (..., slice(edge[1]), whole)) for edge in edges]


def probabilities(q: Tensor, k: Tensor) -> Tensor:
    """Computes probabilities, at least in float32, of the last queries that belong to the keys."""
    (t, s), scores = (q.shape[2], k.shape[2]), q @ k.mT
    scores = scores.to(torch.promote_types(q.dtype, torch.float32)) * q.shape[-1] ** -0.5
    behind = torch.ones(t, s, dtype=torch.bool, device=q.device).triu(s - t + 1)
    return scores.masked_fill_(behind, -torch.inf).softmax(dim=-1)
