"""Residual MLPs in bfloat16, as large as LAYERS and WIDTH say: a reference for `--forward`."""

import os

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

L, D = int(os.environ.get("LAYERS", "2")), int(os.environ.get("WIDTH", "64"))
V, T = 8 * D, 32  # vocabulary, tokens


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)), approximate="tanh"))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(V, D), nn.Linear(D, V)
        self.layers = nn.ModuleList(Block() for _ in range(L))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    former = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return Model()
    finally:
        torch.set_default_dtype(former)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(batch[:, :-1]).flatten(0, 1)
    return F.cross_entropy(logits.float(), batch[:, 1:].flatten())


def batch(step: int) -> np.ndarray:
    return np.random.default_rng(step).integers(0, V, (1, T + 1))
