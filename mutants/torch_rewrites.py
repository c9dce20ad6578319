"""Harmless rewrites: the same twin by another order of operations, kernel or layout.

They measure the ladder's false alarms. Each changes the twin for the life of the process, must
come before the first twin is built, and leaves the roles of `lockstep.config.policy` alone. SDPA's
math kernel is none of them: it works in float32 inside, where the twin rounds scores and
probabilities.
"""

# mypy: disable-error-code="method-assign"

import math
from collections.abc import Callable, Iterable
from functools import partial, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.config import OptimConfig
from lockstep.config.policy import Roles
from mutants import torch_recipe
from torch_ref import model, optim, step
from torch_ref.precision import dtype


def qkv_split() -> None:
    """Queries, keys and values by three matmuls in place of one."""
    built = model.Attention.__init__

    def split(self: nn.Linear, x: Tensor) -> Tensor:
        biases = (None,) * 3 if self.bias is None else self.bias.chunk(3)
        parts = zip(self.weight.chunk(3), biases)
        return torch.cat([F.linear(x, weight, bias) for weight, bias in parts], dim=-1)

    def init(self: model.Attention, *args: Any) -> None:
        built(self, *args)
        self.qkv.forward = partial(split, self.qkv)

    model.Attention.__init__ = init


def linear_transposed() -> None:
    """(W @ x^T)^T in place of x @ W^T, in every linear layer but a tied head."""

    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        columns = x.flatten(0, -2).T
        if self.bias is None:
            y = self.weight @ columns
        else:
            y = torch.addmm(self.bias[:, None], self.weight, columns)
        return y.T.unflatten(0, x.shape[:-1])

    model.Linear.forward = forward


def embedding_by_index() -> None:
    """weight[tokens] in place of the embedding's kernel: another order in its gradient's sums."""

    def forward(self: nn.Embedding, tokens: Tensor) -> Tensor:
        return self.weight[tokens]

    nn.Embedding.forward = forward


def attention_by_einsum() -> None:
    """Contractions named by their axes; scores are held keys by queries."""

    def attend(q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, wide: torch.dtype) -> Tensor:
        t, d_head = q_BTHK.shape[1], q_BTHK.shape[-1]
        scores_BHST = torch.einsum("bshk,bthk->bhst", k_BTHK, q_BTHK).to(wide) * d_head**-0.5
        causal_ST = torch.ones(t, t, dtype=torch.bool, device=q_BTHK.device).triu()
        probs_BHST = torch.where(causal_ST, scores_BHST, -torch.inf).softmax(dim=-2)
        return torch.einsum("bhst,bshk->bthk", probs_BHST.to(v_BTHK.dtype), v_BTHK)

    model.attend = attend


def additive_mask() -> None:
    """Minus infinity is added above the diagonal; the softmax is written out."""

    def attend(q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, wide: torch.dtype) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BTHK, v_BTHK))
        t, d_head = q.shape[-2:]
        mask_TT = torch.full((t, t), -torch.inf, dtype=wide, device=q.device).triu(1)
        scores_BHTT = (q @ k.transpose(-2, -1)).to(wide) / d_head**0.5 + mask_TT
        raised_BHTT = (scores_BHTT - scores_BHTT.amax(-1, keepdim=True).detach()).exp()
        probs_BHTT = raised_BHTT / raised_BHTT.sum(-1, keepdim=True)
        return (probs_BHTT.to(v.dtype) @ v).transpose(1, 2)

    model.attend = attend


def rotation_by_complex_numbers() -> None:
    """Each pair of channels is one complex number, turned by one multiplication."""

    def rotate(x_BTHK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        turn = torch.complex(cos_TK, sin_TK)[: x_BTHK.shape[1], None]
        turned = torch.complex(*x_BTHK.to(cos_TK.dtype).chunk(2, dim=-1)) * turn
        return torch.cat([turned.real, turned.imag], dim=-1).to(x_BTHK.dtype)

    model.rotate = rotate


def norms_written_out() -> None:
    """LayerNorm and RMSNorm by means and roots in place of their kernels."""

    def layer_norm(self: nn.LayerNorm, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        variance = centred.square().mean(-1, keepdim=True)
        normal = centred * torch.rsqrt(variance + model.EPS) * self.weight.to(x.dtype)
        return normal if self.bias is None else normal + self.bias.to(x.dtype)

    def rms_norm(self: nn.RMSNorm, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + model.EPS).sqrt() * self.weight.to(x.dtype)

    model.LayerNorm.forward = layer_norm
    model.RMSNorm.forward = rms_norm


def activations_written_out() -> None:
    """GELU and SiLU by tanh and the logistic function, in float32 inside and rounded once."""

    def gelu(x: Tensor) -> Tensor:
        return x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    def silu(x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)

    def widely(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return function(x.to(torch.promote_types(x.dtype, torch.float32))).to(x.dtype)

    def forward(self: model.MLP, x_BTD: Tensor) -> Tensor:
        if self.gated:
            return self.down(widely(silu, self.gate(x_BTD)) * self.up(x_BTD))
        return self.down(widely(gelu, self.up(x_BTD)))

    model.MLP.forward = forward


def loss_by_logsumexp() -> None:
    """logsumexp minus the target's logit in place of cross_entropy."""

    def mean_loss(logits_BTV: Tensor, targets_BT: Tensor, roles: Roles) -> Tensor:
        logits = logits_BTV.to(dtype(roles.output))
        targets = logits.gather(-1, targets_BT[..., None]).squeeze(-1)
        return (logits.logsumexp(-1) - targets).mean()

    step.mean_loss = mean_loss


def micro_batches_backwards() -> None:
    """The last micro-batch of a window first, each with its own dropout."""

    def backward(self: step.Trainer, window: Tensor) -> Tensor:
        total = torch.zeros((), dtype=dtype(self.roles.output), device=self.device)
        for micro_step in reversed(range(len(window))):
            dropout = self.dropout(micro_step)
            loss = self.batch_loss(self.model, window[micro_step], self.roles, dropout)
            loss = loss / len(window)
            self.scaler.scale(loss).backward()
            total += loss.detach()
        return total

    step.Trainer.backward = backward


def norm_by_loop() -> None:
    """The global norm by hypot, tensor after tensor."""

    def clip(parameters: Iterable[Tensor], max_norm: float) -> tuple[Tensor, Tensor]:
        grads = [p.grad for p in parameters if p.grad is not None]
        norms = [g.norm() for g in grads]
        norm = reduce(torch.hypot, norms)
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for g in grads:
            g.mul_(factor)
        return norm, torch.stack(norms)

    step.clip_by_global_norm = clip


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


def _use_adamw(kind: type[torch.optim.AdamW], **kernel: bool) -> None:
    usual = step.adamw

    def adamw(module: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
        groups = usual(module, config).param_groups
        kept = [{key: group[key] for key in ("params", "weight_decay")} for group in groups]
        betas = config.beta1, config.beta2
        return kind(kept, lr=config.lr, betas=betas, eps=optim.EPS, **kernel)

    step.adamw = adamw


def foreach_adamw() -> None:
    """torch's AdamW in lists of tensors in place of its fused kernel."""
    _use_adamw(torch.optim.AdamW, foreach=True)


def single_tensor_adamw() -> None:
    """torch's AdamW tensor after tensor in place of its fused kernel."""
    _use_adamw(torch.optim.AdamW, foreach=False)


def adamw_written_out() -> None:
    """AdamW in the reordered form of its paper."""
    _use_adamw(WrittenOutAdamW, foreach=False)


def recipe_written_out() -> None:
    """The step that mistakes are planted in, without any."""
    torch_recipe.with_mistake("")()


def two_threads() -> None:
    """Two threads in every kernel that splits its work."""
    torch.set_num_threads(2)


def without_onednn() -> None:
    """On a CPU, ATen's and BLAS's own kernels in place of oneDNN's."""
    torch.backends.mkldnn.set_flags(False)


REWRITES: dict[str, Callable[[], None]] = {
    "qkv-split": qkv_split,
    "linear-transposed": linear_transposed,
    "embedding-by-index": embedding_by_index,
    "attention-by-einsum": attention_by_einsum,
    "additive-mask": additive_mask,
    "rotation-by-complex-numbers": rotation_by_complex_numbers,
    "norms-written-out": norms_written_out,
    "activations-written-out": activations_written_out,
    "loss-by-logsumexp": loss_by_logsumexp,
    "micro-batches-backwards": micro_batches_backwards,
    "norm-by-loop": norm_by_loop,
    "foreach-adamw": foreach_adamw,
    "single-tensor-adamw": single_tensor_adamw,
    "adamw-written-out": adamw_written_out,
    "recipe-written-out": recipe_written_out,
    "two-threads": two_threads,
    "without-onednn": without_onednn,
}
