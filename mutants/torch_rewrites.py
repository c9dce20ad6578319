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
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.config import OptimConfig
from lockstep.data.batch import Batch
from mutants.patch import Plant, after, assign, both, edit, wrap
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
    logits_BTV: Tensor, batch: Batch, dtype: torch.dtype, over: Tensor | None = None
) -> Tensor:
    """logsumexp minus the target's logit in place of cross_entropy, and weights of 0 and 1."""
    logits = logits_BTV.to(dtype)
    losses = logits.logsumexp(-1) - logits.gather(-1, batch.targets[..., None]).squeeze(-1)
    if batch.counts is None or over is None:
        return losses.mean()
    return (losses * batch.counts / over.to(losses.dtype)).sum()


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
    "small-buckets": wrap(DistributedDataParallel, "__init__", lambda right, *args, **rest: right(
        *args, bucket_cap_mb=0.01, **rest)),
    # the average of averages so far: more exchanges, and the same gradient
    "reduced-with-every-micro-batch": wrap(mesh, "accumulate", lambda right, model, last: right(
        model, last=True)),
}  # fmt: skip
REWRITES: dict[str, Plant] = {
    **WORLD_REWRITES,
    "qkv-split": after(model.Attention, "__init__", split_qkv),
    "linear-transposed": assign(model.Linear, "forward", transpose_linear),
    # another order in the sums of its gradient
    "embedding-by-index": assign(
        nn.Embedding, "forward", lambda self, tokens: self.weight[tokens]
    ),
    # contractions named by their axes; scores are held keys by queries
    "attention-by-einsum": edit(
        model.attend, "matmul(q, k.transpose(-2, -1))", "torch.einsum('bhsk,bhtk->bhst', k, q)",
        "places.seen(q.device)", "places.seen(q.device).mT", "dim=-1", "dim=-2",
        "matmul(probs_BHTT.to(v.dtype), v).transpose(1, 2)",
        "torch.einsum('bhst,bhsk->bthk', probs_BHTT.to(v.dtype), v)",
    ),
    # minus infinity is added to what is not seen; the softmax is written out
    "additive-mask": edit(
        model.attend, "dtype) * d_head**-0.5", "dtype) / d_head**0.5",
        "torch.where(places.seen(q.device), scores_BHTT, -torch.inf)",
        "scores_BHTT + scores_BHTT.new_zeros(()).masked_fill(~places.seen(q.device), -torch.inf)",
        "scores_BHTT.softmax(dim=-1)",
        "(scores_BHTT - scores_BHTT.amax(-1, keepdim=True).detach()).exp()\n"
        "    probs_BHTT = probs_BHTT / probs_BHTT.sum(-1, keepdim=True)",
    ),
    "rotation-by-complex-numbers": assign(model, "rotate", rotate_by_complex_numbers),
    # by means and roots
    "norms-written-out": both(
        edit(model.LayerNorm.forward,
             "return F.layer_norm(x_RD, self.normalized_shape, weight, bias, self.eps)",
             "x = x_RD - x_RD.mean(-1, keepdim=True)\n"
             "    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * weight\n"
             "    return x if bias is None else x + bias"),
        edit(model.RMSNorm.forward, "F.rms_norm(x_RD, self.normalized_shape, ",
             "x_RD / (x_RD.square().mean(-1, keepdim=True) + self.eps).sqrt() * (",
             ", self.eps)", ")"),
    ),
    "activations-written-out": assign(model.MLP, "forward", mlp_written_out),
    "loss-by-logsumexp": assign(step, "mean_loss", loss_by_logsumexp),
    # the last of a window first, each with its own dropout
    "micro-batches-backwards": edit(
        Trainer.micro_batch_loss, "batch, dropout =",
        "micro_step = len(window.tokens) - 1 - micro_step\n    batch, dropout =",
    ),
    # by hypot, tensor after tensor
    "norm-by-loop": edit(
        optim.clip_by_global_norm, "torch.linalg.vector_norm(norms)",
        "parameters[0].grad.norm()\n    for p in parameters[1:]:\n"
        "        norm = torch.hypot(norm, p.grad.norm())",
        "clip_grads_with_norm_(parameters, clip, norm)",
        "for p in parameters:\n        p.grad.mul_(torch.clamp(clip / (norm + 1e-6), max=1.0))",
    ),
    # lists of tensors, or tensor after tensor, in place of the fused kernel
    "foreach-adamw": use_adamw(torch.optim.AdamW, foreach=True),
    "single-tensor-adamw": use_adamw(torch.optim.AdamW, foreach=False),
    "adamw-written-out": use_adamw(WrittenOutAdamW, foreach=False),
    "two-threads": partial(torch.set_num_threads, 2),
    # on a CPU, ATen's and BLAS's own kernels
    "without-onednn": partial(torch.backends.mkldnn.set_flags, False),
}  # fmt: skip
