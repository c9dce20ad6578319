"""Semantics-preserving variants: the same twin by another order of operations, kernel or layout.

They measure the ladder's false-positive rate. Each must come before the first twin is built, and
leaves the roles of `lockstep.config.policy` alone. SDPA's math kernel is none of them: it works in
float32 inside, where the twin rounds scores and probabilities.
"""

import math
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.config import OptimConfig
from lockstep.data.batch import Batch
from mutants.patch import Plant, after, assign, both, wrap
from torch_ref import model, optim, step
from torch_ref.extra.mesh import mesh
from torch_ref.extra.packed import Segments
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


def index_embedding(self: nn.Embedding, tokens: Tensor) -> Tensor:
    """In place of the embedding's kernel: another order in its gradient's sums."""
    return self.weight[tokens]


def find_segments(places: model.Places) -> Tensor | None:
    """Returns where query and key are of one segment, if a row has several; else None."""
    return places.same_BTT if isinstance(places, Segments) else None


def attend_by_einsum(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHK: Tensor,
    places: model.Places,
    *,
    dtype: torch.dtype,
    **_: Any,
) -> Tensor:
    """Contractions named by their axes; scores are held keys by queries."""
    t, d_head = q_BTHK.shape[1], q_BTHK.shape[-1]
    same_BTT = find_segments(places)
    scores_BHST = torch.einsum("bshk,bthk->bhst", k_BTHK, q_BTHK).to(dtype) * d_head**-0.5
    seen = torch.ones(t, t, dtype=torch.bool, device=q_BTHK.device).triu()
    seen = seen if same_BTT is None else seen & same_BTT.mT[:, None]
    probs_BHST = torch.where(seen, scores_BHST, -torch.inf).softmax(dim=-2)
    return torch.einsum("bhst,bshk->bthk", probs_BHST.to(v_BTHK.dtype), v_BTHK)


def attend_additively(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHK: Tensor,
    places: model.Places,
    *,
    dtype: torch.dtype,
    **_: Any,
) -> Tensor:
    """Minus infinity is added above the diagonal; the softmax is written out."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BTHK, v_BTHK))
    t, d_head = q.shape[-2:]
    mask_TT = torch.full((t, t), -torch.inf, dtype=dtype, device=q.device).triu(1)
    if (same_BTT := find_segments(places)) is not None:
        mask_TT = mask_TT.masked_fill(~same_BTT[:, None], -torch.inf)
    scores_BHTT = (q @ k.transpose(-2, -1)).to(dtype) / d_head**0.5 + mask_TT
    raised_BHTT = (scores_BHTT - scores_BHTT.amax(-1, keepdim=True).detach()).exp()
    probs_BHTT = raised_BHTT / raised_BHTT.sum(-1, keepdim=True)
    return (probs_BHTT.to(v.dtype) @ v).transpose(1, 2)


def rotate_by_complex_numbers(x_BTHK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Each pair of channels is one complex number, turned by one multiplication."""
    turn = torch.complex(cos_TK, sin_TK)[..., None, :]
    turned = torch.complex(*x_BTHK.to(cos_TK.dtype).chunk(2, dim=-1)) * turn
    return torch.cat([turned.real, turned.imag], dim=-1).to(x_BTHK.dtype)


def layer_norm(self: nn.LayerNorm, x: Tensor) -> Tensor:
    """By means and roots in place of its kernel."""
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    normal = centred * torch.rsqrt(variance + self.eps) * self.weight.to(x.dtype)
    return normal if self.bias is None else normal + self.bias.to(x.dtype)


def rms_norm(self: nn.RMSNorm, x: Tensor) -> Tensor:
    assert self.eps is not None
    return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.weight.to(x.dtype)


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


def count_backwards(
    right: Callable, self: Trainer, window: Batch, over: Tensor | None, micro_step: int
) -> Tensor:
    """The last micro-batch of a window first, each with its own dropout."""
    return right(self, window, over, len(window.tokens) - 1 - micro_step)


def clip_by_loop(parameters: list[nn.Parameter], clip: float, norms: Tensor) -> Tensor:
    """The global norm by hypot, tensor after tensor."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = reduce(torch.hypot, [g.norm() for g in grads])
    factor = torch.clamp(clip / (norm + 1e-6), max=1.0)
    for g in grads:
        g.mul_(factor)
    return norm


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
    "embedding-by-index": assign(nn.Embedding, "forward", index_embedding),
    "attention-by-einsum": assign(model, "attend", attend_by_einsum),
    "additive-mask": assign(model, "attend", attend_additively),
    "rotation-by-complex-numbers": assign(model, "rotate", rotate_by_complex_numbers),
    "norms-written-out": both(
        assign(model.LayerNorm, "forward", layer_norm), assign(model.RMSNorm, "forward", rms_norm)
    ),
    "activations-written-out": assign(model.MLP, "forward", mlp_written_out),
    "loss-by-logsumexp": assign(step, "mean_loss", loss_by_logsumexp),
    "micro-batches-backwards": wrap(Trainer, "micro_batch_loss", count_backwards),
    "norm-by-loop": assign(step, "clip_by_global_norm", clip_by_loop),
    # lists of tensors, or tensor after tensor, in place of the fused kernel
    "foreach-adamw": use_adamw(torch.optim.AdamW, foreach=True),
    "single-tensor-adamw": use_adamw(torch.optim.AdamW, foreach=False),
    "adamw-written-out": use_adamw(WrittenOutAdamW, foreach=False),
    "two-threads": partial(torch.set_num_threads, 2),
    # on a CPU, ATen's and BLAS's own kernels
    "without-onednn": partial(torch.backends.mkldnn.set_flags, False),
}
