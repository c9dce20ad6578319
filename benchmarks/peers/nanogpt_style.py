"""GPT-2 and its training step by hand: the eager PyTorch loop in nanoGPT's idiom.

The lower bound that `torch_ref` is measured against: nothing in it is there for any other end than
the step. It imports nothing of ours on purpose. Shapes: B batch, T time, D width, H heads, K head
dim, V vocabulary, N micro-batches. A weight is out x in.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        b, t, d = x_BTD.shape
        parts = self.qkv(x_BTD).split(d, dim=-1)
        q, k, v = (y.view(b, t, self.heads, d // self.heads).transpose(1, 2) for y in parts)
        y_BHTK = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y_BHTK.transpose(1, 2).reshape(b, t, d))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BTD), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attn(self.norm1(x_BTD))
        return x_BTD + self.mlp(self.norm2(x_BTD))


class GPT(nn.Module):
    """Tokens and targets (B, T) -> mean loss in nats."""

    def __init__(self, *, vocab: int, context: int, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        places_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.embed(tokens_BT) + self.position(places_T)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        x_BTD = self.norm(x_BTD)
        logits_BTV = F.linear(x_BTD, self.embed.weight)  # tied
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def adamw(
    model: nn.Module,
    decays: Callable[[str], bool],
    *,
    betas: tuple[float, float],
    weight_decay: float,
) -> torch.optim.AdamW:
    """Two groups, by the parameters' names; the step sets the rate."""
    named = dict(model.named_parameters())
    decay = [p for name, p in named.items() if decays(name)]
    rest = [p for name, p in named.items() if not decays(name)]
    groups: list[dict[str, Any]] = [
        {"params": decay, "weight_decay": weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=betas, fused=True)


def train_step(
    model: Callable[[Tensor, Tensor], Tensor],
    parameters: list[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    autocast: AbstractContextManager,
    window: Tensor,
    *,
    rate: float,
    clip: float,
) -> Tensor:
    """One optimizer step on (N, B, T+1) tokens -> (2,): the mean loss, and the gradient's norm.

    Waits for nothing: who wants the two numbers on the host fetches them.
    """
    for group in optimizer.param_groups:
        group["lr"] = rate
    losses = []
    for batch in window:
        with autocast:
            loss = model(batch[:, :-1], batch[:, 1:]) / len(window)
        scaler.scale(loss).backward()
        losses.append(loss.detach())
    scaler.unscale_(optimizer)
    norm = clip_grad_norm_(parameters, clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return torch.stack([torch.stack(losses).sum(), norm])
