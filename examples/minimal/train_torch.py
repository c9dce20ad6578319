"""Train a GPT in mixed precision with PyTorch, in one file that you can copy.

    python examples/minimal/train_torch.py --policy bf16

On an Intel Xeon with AMX: validation loss 5.2789 -> 2.2642 nats a byte after 300 steps.

train_jax.py is the same program in JAX: read the two side by side.
Shapes: B batch, T time, D width, F 4 D, H heads, K width of a head, V vocabulary, N micro-batches.
"""

import argparse
import math
import sysconfig
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

POLICIES = {  # dtypes of the parameters and of matrix products
    "fp64": (torch.float64, torch.float64),  # to compare programs: a difference is then a bug
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.float32, torch.bfloat16),
    "fp16": (torch.float32, torch.float16),
}


class Config(NamedTuple):  # each field is a flag: --policy fp16 --width 256
    policy: str = "bf16"
    steps: int = 300
    accum: int = 2  # N, micro-batches in an optimizer step
    batch_size: int = 8  # B, rows in a micro-batch
    remat: int = 1  # 0: keep all activations for the backward pass
    vocab: int = 256
    context: int = 128
    layers: int = 4
    heads: int = 4
    width: int = 128
    lr: float = 2e-3
    clip: float = 1.0


def draw_window(config: Config, text: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns int32 (N, B, T+1): a row's first T bytes are tokens, its last T are targets."""
    starts = rng.integers(len(text) - config.context, size=(config.accum, config.batch_size, 1))
    return text[starts + np.arange(config.context + 1)].astype(np.int32)


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        d, self.heads = config.width, config.heads
        self.norm1, self.qkv, self.proj = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.norm2, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x_BTD: Tensor) -> Tensor:
        b, t, d = x_BTD.shape
        qkv = self.qkv(self.norm1(x_BTD))
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in qkv.split(d, dim=-1))
        y_BHTK = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.proj(y_BHTK.transpose(1, 2).reshape(b, t, d))
        x_BTF = F.gelu(self.up(self.norm2(x_BTD)), approximate="tanh")
        return x_BTD + self.down(x_BTF)


class GPT(nn.Module):
    """Tokens (B, T) -> logits (B, T, V), or with targets (B, T) their mean loss in nats."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.remat = config.remat
        self.embed = nn.Embedding(config.vocab, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        x_BTD = self.embed(tokens_BT) + self.position.weight[: tokens_BT.shape[1]]
        for block in self.blocks:
            # Only a block's input is kept; the backward pass computes the block again.
            x_BTD = checkpoint(block, x_BTD, use_reentrant=False) if self.remat else block(x_BTD)
        logits_BTV = F.linear(self.norm(x_BTD), self.embed.weight)
        if targets_BT is None:
            return logits_BTV
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def init_params(config: Config, model: GPT) -> None:
    """GPT-2's: normal with deviation 0.02, less in layers that add to the residual stream."""
    small = 0.02 / math.sqrt(2 * config.layers)
    for name, p in model.named_parameters():
        if p.ndim == 2:
            nn.init.normal_(p, std=small if ".proj" in name or ".down" in name else 0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(p)


def mean_loss(config: Config, model: nn.Module, batch: Tensor) -> Tensor:
    """Mean cross-entropy of (B, T+1) tokens, in nats."""
    param, compute = POLICIES[config.policy]
    # Casts the inputs of matrix products; norms, softmax and loss stay in float32.
    with torch.autocast(batch.device.type, compute, enabled=compute != param):
        return model(batch[:, :-1], batch[:, 1:])


def learning_rate(config: Config, update: int) -> float:
    """optax.warmup_cosine_decay_schedule: linear from 0, then half a cosine back to 0."""
    warmup = config.steps // 10
    if update < warmup:
        return config.lr * update / warmup
    progress = (update - warmup) / (config.steps - warmup)
    return config.lr * 0.5 * (1 + math.cos(math.pi * progress))


def make_optimizer(model: GPT) -> torch.optim.Optimizer:
    """AdamW; each step sets its learning rate."""
    # Matrices decay; norms, biases and embeddings do not.
    decays = [p for p in model.blocks.parameters() if p.ndim == 2]
    rest = [model.embed.weight, model.position.weight, *model.norm.parameters()]
    rest += [p for p in model.blocks.parameters() if p.ndim == 1]
    groups = [{"params": decays, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def train_step(
    config: Config,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    window: Tensor,
    rate: float,
) -> Tensor:
    """One optimizer step on (N, B, T+1) tokens -> (2,): the loss, and the gradient's norm."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    losses = []
    for batch in window:
        loss = mean_loss(config, model, batch) / config.accum
        scaler.scale(loss).backward()  # adds to .grad
        losses.append(loss.detach())
    scaler.unscale_(optimizer)  # before clipping, which needs the true gradient's norm
    norm = clip_grad_norm_(model.parameters(), config.clip)
    scaler.step(optimizer)  # does nothing if a gradient is infinite or NaN
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return torch.stack([torch.stack(losses).sum(), norm])


def main() -> None:
    parser = argparse.ArgumentParser()
    choices = {"policy": tuple(POLICIES)}
    for name, value in Config._field_defaults.items():
        parser.add_argument(f"--{name}", type=type(value), default=value, choices=choices.get(name))
    config = Config(**vars(parser.parse_args()))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    place = partial(torch.tensor, dtype=torch.int64, device=device)
    # Python's standard library; each byte is a token. The last tenth is for validation.
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
    train, val = np.split(text, [len(text) * 9 // 10])
    rng, _ = np.random.default_rng(0), torch.manual_seed(0)
    held_out = np.concatenate([draw_window(config, val, rng) for _ in range(20)])
    model = GPT(config).to(device, POLICIES[config.policy][0])
    init_params(config, model)
    # Many gradients are below float16's smallest number, 6e-8.
    scaler = torch.amp.GradScaler(device, enabled=config.policy == "fp16")
    optimizer, updates = make_optimizer(model), 0
    loss_of = torch.no_grad()(partial(mean_loss, config))
    before = np.mean([loss_of(model, batch).item() for batch in place(held_out)])
    for done in range(1, config.steps + 1):
        window, rate = place(draw_window(config, train, rng)), learning_rate(config, updates)
        scale = scaler.get_scale()
        metrics = train_step(config, model, optimizer, scaler, window, rate)
        updates += scaler.get_scale() >= scale  # the scale shrinks when it skips an update
        if done == 1 or done % 50 == 0:
            loss, norm = metrics.tolist()
            print(f"step {done}: loss {loss:.4f}, gradient norm {norm:.2f}")
    after = np.mean([loss_of(model, batch).item() for batch in place(held_out)])
    print(f"validation loss {before:.4f} -> {after:.4f} nats a byte")
    tokens = val[: config.context].tolist()
    for _ in range(300):
        logits_V = model(place([tokens[-config.context :]]))[0, -1].detach().float().cpu().numpy()
        tokens.append(np.argmax(logits_V + rng.gumbel(size=config.vocab)))  # draws from the softmax
    print(bytes(tokens[config.context :]).decode(errors="replace"))


if __name__ == "__main__":
    main()
