"""Products and attention that are faster on some CPUs than torch's own.

- float32 by oneDNN: torch asks MKL, which on a CPU that is not Intel's does without AVX-512
  (docs/decisions/speed-and-compilers.md);
- half precision in float32: without units for it, torch's own kernels are several times slower
  than those of float32 (the same page);
- attention in bfloat16 in blocks: torch's fused kernel multiplies without the units for bfloat16
  (docs/decisions/speed-and-compilers.md).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lockstep.config import Config
from lockstep.config.policy import Dtypes
from lockstep.model.attention import block_edges, query_blocks

from ..model import Product

HALF = ("bfloat16", "float16")
LIBRARY, WIDENED = "onednn", "widened"
# x (R, in), weight (out, in), bias (out), and what is fused behind it; only some builds have it.
LINEAR = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    assert LINEAR
    return LINEAR(x, weight, bias, "none", [], "")


def in_float32(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        y = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return y.to(x.dtype)


def shaped(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(len(x), len(weight))


# What the compiler calls and does not look into: oneDNN's operator it wants with packed weights,
# and what remat keeps of a product is the rounded result, which no operation of torch's gives.
OPAQUE = torch.library.Library("lockstep", "DEF")
for name, function in {"linear": by_onednn, "widened_linear": in_float32}.items():
    OPAQUE.define(f"{name}(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
    OPAQUE.impl(name, function, "CPU")
    torch.library.register_fake(f"lockstep::{name}", shaped, lib=OPAQUE)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if torch.compiler.is_compiling():
        return torch.ops.lockstep.linear(x, weight, bias)
    return by_onednn(x, weight, bias)


def multiply_in_float32(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.lockstep.widened_linear(x, weight, bias)


class Operands(torch.autograd.Function):
    """x (R, in), weight (out, in), bias (out) -> a gradient's place (R, out), of no memory.

    Keeps what the derivative of the product needs, before it is made: what recomputes them for the
    backward pass need not make the last one.
    """

    @staticmethod
    def forward(
        ctx: Any, multiply: Multiply, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.multiply = multiply
        ctx.save_for_backward(x, weight)
        return x.new_empty(()).expand(len(x), len(weight))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), (x, weight), wanted = grads, ctx.saved_tensors, ctx.needs_input_grad
        return (
            None,
            ctx.multiply(dy, weight.mT) if wanted[1] else None,
            ctx.multiply(dy.mT, x.mT) if wanted[2] else None,
            dy.sum(0) if wanted[3] else None,
        )


class Multiplied(torch.autograd.Function):
    """x @ weight.T + bias, its gradient passed on to the place."""

    @staticmethod
    def forward(ctx: Any, place: Tensor, multiply: Multiply, *operands: Any) -> Tensor:
        return multiply(*operands)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None, None, None, None


def linear_by(multiply: Multiply, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, its sums in another order."""
    operands = [each if each is None else as_autocast(each) for each in (x, weight, bias)]
    constants = (each if each is None else each.detach() for each in operands)
    return Multiplied.apply(Operands.apply(multiply, *operands), multiply, *constants)


def as_autocast(x: Tensor) -> Tensor:
    """Casts an operand as autocast does, where it is on."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def choose_product(config: Config, dtypes: Dtypes) -> Product:
    """Returns the product of rows and weights that `--autotune` took on this CPU."""
    way = config.run.ways.get("matmul")
    if way == LIBRARY and LINEAR is not None and dtypes.compute == "float32":
        return linear
    return widened_linear if way == WIDENED and dtypes.compute in HALF else F.linear


linear = partial(linear_by, multiply)
widened_linear = partial(linear_by, multiply_in_float32)
OPERATORS = [torch.ops.lockstep.linear, torch.ops.lockstep.widened_linear, *filter(None, [LINEAR])]
for operator in OPERATORS:
    register_flop_formula(operator)(lambda x, weight, *rest, **how: 2 * x.numel() * weight[0])


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
