"""transformers' GPT-2, small: a reference. GPT2=full gives it its size, GPT2=layers its layers."""

import os

import numpy as np
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

SIZES = {"full": (50257, 1024, 768, 12, 12), "layers": (61, 12, 24, 3, 12)}
# Vocabulary, context, width, heads, layers.
V, T, D, H, L = SIZES.get(os.environ.get("GPT2", ""), (61, 12, 24, 3, 2))


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=V, n_positions=T, n_embd=D, n_head=H, n_layer=L, use_cache=False)
    )


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    logits = model(batch[:, :-1]).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def batch(step: int) -> np.ndarray:
    return np.random.default_rng(step).integers(0, V, (4, min(T, 16) + 1))
