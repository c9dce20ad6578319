"""Semantics-preserving variants: the same twin by another order of operations, kernel or layout.

They measure the ladder's false-positive rate. Each must come before the first twin is built, and
leaves the roles of `lockstep.config.policy` alone. SDPA's math kernel is none of them: it works in
float32 inside, where the twin rounds scores and probabilities.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch._inductor.config  # strict numerics import it: once, and not in each fork
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.config import OptimConfig
from lockstep.data.batch import Batch
from mutants.patch import Plant, after, assign, both, wrap
from torch_ref import model, optim, step
from torch_ref.extra.mesh import mesh
from torch_ref.step import Trainer


def split_qkv(self: model.Attention, *args: Any) -> None:
    """Queries, keys and values by three matmuls in place of one, whose gradients to x are summed
    widely and rounded once: three rounded ones are another rounding, which bfloat16 shows."""

    def forward(x: Tensor) -> Tensor:
        device, layer = x.device.type, self.qkv
        under = torch.is_autocast_enabled(device)
        compute = torch.get_autocast_dtype(device) if under else x.dtype
        wide = torch.promote_types(compute, torch.float32)
        with torch.autocast(device, enabled=False):
            x, weight = x.to(compute).to(wide), layer.weight.to(compute).to(wide)
            y = torch.cat([F.linear(x, part) for part in weight.chunk(3)], dim=-1)
            return (y if layer.bias is None else y + layer.bias.to(compute).to(wide)).to(compute)

    self.qkv.forward = forward


def transpose_linear(self: nn.Linear, x: Tensor) -> Tensor:
    """(W @ x^T)^T in place of x @ W^T, in every linear layer but a tied head."""
    columns = x.flatten(0, -2).T
    if self.bias is None:
        y = self.weight @ columns
    else:
        y = torch.addmm(self.bias[:, None], self.weight, columns)
    return y.T.unflatten(0, x.shape[:-1])


def attend_by_einsum(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGK: Tensor,
    positions: model.Positions,
    *,
    dtype: torch.dtype,
    **_: Any,
) -> Tensor:
    """Contractions named by their axes; scores are held keys by queries."""
    heads, d_head = q_BTHK.shape[2:]
    k_BTHK, v_BTHK = (model.repeat_heads(x, heads) for x in (k_BTGK, v_BTGK))
    scores_BHST = torch.einsum("bshk,bthk->bhst", k_BTHK, q_BTHK).to(dtype) * d_head**-0.5
    seen_ST = positions.causal_mask(q_BTHK.device).mT
    probs_BHST = torch.where(seen_ST, scores_BHST, -torch.inf).softmax(dim=-2)
    return torch.einsum("bhst,bshk->bthk", probs_BHST.to(v_BTHK.dtype), v_BTHK)


def attend_with_additive_mask(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGK: Tensor,
    positions: model.Positions,
    *,
    dtype: torch.dtype,
    matmul: Callable[..., Tensor] = torch.matmul,
) -> Tensor:
    """Minus infinity is added to what is not seen; the softmax is written out."""
    heads, d_head = q_BTHK.shape[2:]
    q, k, v = (model.repeat_heads(x, heads).transpose(1, 2) for x in (q_BTHK, k_BTGK, v_BTGK))
    scores_BHTT = matmul(q, k.transpose(-2, -1)).to(dtype) / d_head**0.5
    unseen = ~positions.causal_mask(q.device)
    scores_BHTT = scores_BHTT + scores_BHTT.new_zeros(()).masked_fill(unseen, -torch.inf)
    exponentials = (scores_BHTT - scores_BHTT.amax(-1, keepdim=True).detach()).exp()
    probs_BHTT = exponentials / exponentials.sum(-1, keepdim=True)
    return matmul(probs_BHTT.to(v.dtype), v).transpose(1, 2)


def layer_norm(self: model.LayerNorm, x_RD: Tensor) -> Tensor:
    """By means and a root."""
    x_RD = model.widen(x_RD)
    x = x_RD - x_RD.mean(-1, keepdim=True)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
    x = x * self.weight.to(x.dtype)
    return x if self.bias is None else x + self.bias.to(x.dtype)


def rms_norm(self: model.RMSNorm, x_RD: Tensor) -> Tensor:
    """By a mean and a root."""
    assert self.eps is not None
    x_RD = model.widen(x_RD)
    root = (x_RD.square().mean(-1, keepdim=True) + self.eps).sqrt()
    return x_RD / root * self.weight.to(x_RD.dtype)


def clip_by_loop(parameters: list[nn.Parameter], clip: float, norms: Tensor) -> Tensor:
    """By hypot, tensor after tensor."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = grads[0].norm()
    for grad in grads[1:]:
        norm = torch.hypot(norm, grad.norm())
    for grad in grads:
        grad.mul_(torch.clamp(clip / (norm + 1e-6), max=1.0))
    return norm


def rotate_by_complex_numbers(x_BTHK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Each pair of channels is one complex number, turned by one multiplication."""
    turn = torch.complex(cos_TK, sin_TK)[..., None, :]
    turned = torch.complex(*x_BTHK.to(cos_TK.dtype).chunk(2, dim=-1)) * turn
    return torch.cat([turned.real, turned.imag], dim=-1).to(x_BTHK.dtype)


def mlp_written_out(self: model.MLP, x_BTD: Tensor) -> Tensor:
    """GELU and SiLU by tanh and the logistic function, in float32 inside and rounded once."""

    def gelu(x: Tensor) -> Tensor:
        return x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    def silu(x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)

    def widely(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return function(x.to(torch.promote_types(x.dtype, torch.float32))).to(x.dtype)

    if self.gated:
        return self.down(widely(silu, self.gate(x_BTD)) * self.up(x_BTD))
    return self.down(widely(gelu, self.up(x_BTD)))


def loss_by_logsumexp(
    logits_BTV: Tensor, batch: Batch, dtype: torch.dtype, target_count: Tensor | None = None
) -> Tensor:
    """logsumexp minus the target's logit in place of cross_entropy, and weights of 0 and 1."""
    logits = logits_BTV.to(dtype)
    losses = logits.logsumexp(-1) - logits.gather(-1, batch.targets[..., None]).squeeze(-1)
    if batch.counts is None or target_count is None:
        return losses.mean()
    return (losses * batch.counts / target_count.to(losses.dtype)).sum()


class WrittenOutAdamW(torch.optim.AdamW):
    """Corrections of the bias folded into rate and epsilon; decay and direction in one sum."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]  # never empty: the bridge fills it
                state["step"] += 1
                t = state["step"].item()
                root = math.sqrt(1 - beta2**t)
                mean, square = state["exp_avg"], state["exp_avg_sq"]
                mean.copy_(beta1 * mean + (1 - beta1) * p.grad)
                square.copy_(beta2 * square + (1 - beta2) * p.grad**2)
                direction = root / (1 - beta1**t) * mean / (square.sqrt() + group["eps"] * root)
                p.sub_(group["lr"] * (group["weight_decay"] * p + direction))


def use_adamw(kind: type[torch.optim.AdamW], **kernel: bool) -> Plant:
    def make(right: Callable, module: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
        groups = right(module, config).param_groups
        kept = [{key: group[key] for key in ("params", "weight_decay")} for group in groups]
        betas = config.beta1, config.beta2
        return kind(kept, lr=config.lr, betas=betas, eps=optim.ADAM_EPS, **kernel)

    return wrap(step, "adamw", make)


WORLD_REWRITES: dict[str, Plant] = {
    "small-buckets": wrap(
        DistributedDataParallel,
        "__init__",
        lambda right, *args, **rest: right(*args, bucket_cap_mb=0.01, **rest),
    ),
    # the average of averages so far: more exchanges, and the same gradient
    "reduced-with-every-micro-batch": wrap(
        mesh, "accumulate", lambda right, model, last: right(model, last=True)
    ),
}
REWRITES: dict[str, Plant] = {
    **WORLD_REWRITES,
    "qkv-split": after(model.Attention, "__init__", split_qkv),
    "linear-transposed": assign(model.Linear, "forward", transpose_linear),
    # another order in the sums of its gradient
    "embedding-by-index": assign(nn.Embedding, "forward", lambda self, tokens: self.weight[tokens]),
    "attention-by-einsum": assign(model, "attend", attend_by_einsum),
    "additive-mask": assign(model, "attend", attend_with_additive_mask),
    "rotation-by-complex-numbers": assign(model, "rotate", rotate_by_complex_numbers),
    "norms-written-out": both(
        assign(model.LayerNorm, "forward", layer_norm), assign(model.RMSNorm, "forward", rms_norm)
    ),
    "activations-written-out": assign(model.MLP, "forward", mlp_written_out),
    "loss-by-logsumexp": assign(step, "mean_loss", loss_by_logsumexp),
    # the last of a window first, each with its own dropout
    "micro-batches-backwards": wrap(
        Trainer,
        "micro_batch_loss",
        lambda right, self, window, target_count, number: right(
            self, window, target_count, len(window.tokens) - 1 - number
        ),
    ),
    "norm-by-loop": assign(step, "clip_by_global_norm", clip_by_loop),
    # lists of tensors, or tensor after tensor, in place of the fused kernel
    "foreach-adamw": use_adamw(torch.optim.AdamW, foreach=True),
    "single-tensor-adamw": use_adamw(torch.optim.AdamW, foreach=False),
    "adamw-written-out": use_adamw(WrittenOutAdamW, foreach=False),
    "two-threads": partial(torch.set_num_threads, 2),
    # on a CPU, ATen's and BLAS's own kernels
    "without-onednn": partial(torch.backends.mkldnn.set_flags, False),
}
