"""PyTorch's twin with attention as its kernel for float32 computes on a GPU since Ampere.

That kernel (CUTLASS's, "memory-efficient attention") multiplies float32 by three products of TF32:
an operand is cut to TF32, its rest is rounded to TF32, and the product of two rests is left out.
The units add some products at a time, and cut each sum. The backward pass subtracts a row's sum of
dy * y, which other products rounded than those that it is subtracted from.
"""

from typing import Any

import torch
from torch import Tensor

from lockstep.config import Config
from lockstep.config.policy import Dtypes
from lockstep.devices import Capabilities
from lockstep.model.attention import AttentionChoice, wants_fused
from torch_ref import model
from torch_ref.extra import attention, rules
from torch_ref.twin import build

__all__ = ["build"]

AT_ONCE = 8  # products that a unit adds
LOW_BITS = 2**13 - 1  # of float32's, which TF32 has not
choose_attention = rules.choose_attention


def cut(x: Tensor, added: int = 0) -> Tensor:
    """Cuts float32 to TF32; with half of the last digit added, it is rounded."""
    return ((x.contiguous().view(torch.int32) + added) & ~LOW_BITS).view(torch.float32)


def to_zero(x: Tensor) -> Tensor:
    """Cuts float64 to float32."""
    y = x.float()
    return torch.where(y.double().abs() > x.abs(), torch.nextafter(y, torch.zeros_like(y)), y)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """(..., M, K) @ (..., K, N) in float32."""
    a_large, b_large = cut(a), cut(b)
    a_small, b_small = (cut(x - large, 2**12) for x, large in ((a, a_large), (b, b_large)))
    y = a.new_zeros(*a.shape[:-1], b.shape[-1])
    for k in range(0, a.shape[-1], AT_ONCE):
        a1, a2 = (x[..., k : k + AT_ONCE].double() for x in (a_large, a_small))
        b1, b2 = (x[..., k : k + AT_ONCE, :].double() for x in (b_large, b_small))
        y = to_zero(y.double() + a2 @ b1 + a1 @ (b1 + b2))
    return y


class Attention(torch.autograd.Function):
    """Causal attention of q, k, v (B, H, T, K)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        t, scores = q.shape[2], multiply(q, k.mT) * q.shape[-1] ** -0.5
        probs = scores.masked_fill(torch.ones(t, t).triu(1).bool(), -torch.inf).softmax(-1)
        y = multiply(probs, v)
        ctx.save_for_backward(q, k, v, probs, y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        (dy,), (q, k, v, probs, y) = grads, ctx.saved_tensors
        dprobs = multiply(dy, v.mT)
        dscores = probs * (dprobs - (dy * y).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        return multiply(dscores, k), multiply(dscores.mT, q), multiply(probs.mT, dy)


def attend(q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, positions: Any) -> Tensor:
    heads = q_BTHK.shape[2]
    q, k, v = (model.repeat_heads(x, heads).transpose(1, 2) for x in (q_BTHK, k_BTGK, v_BTGK))
    return Attention.apply(q, k, v).transpose(1, 2)


def choose(config: Config, dtypes: Dtypes, device: Capabilities) -> AttentionChoice:
    """Takes the kernel under TF32, too, which a CPU otherwise rounds by hand."""
    fused = AttentionChoice(attention.SDPA)
    return fused if wants_fused(config.precision) else choose_attention(config, dtypes, device)


attention.attend_fused = attend
rules.choose_attention = choose
