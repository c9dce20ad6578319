"""transformers' Llama with grouped queries, small: a reference. LLAMA=full gives it 16 layers."""

import os

import numpy as np
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

V, T, D, H, G, F, L = 53, 10, 24, 4, 2, 40, 2  # H heads in G groups, F the width of the mlp
if os.environ.get("LLAMA") == "full":  # the layers of Llama 3.2 1B
    V, T, D, H, G, F, L = 300, 64, 96, 8, 2, 200, 16


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=V, hidden_size=D, intermediate_size=F, num_hidden_layers=L,
        num_attention_heads=H, num_key_value_heads=G, max_position_embeddings=T,
        rms_norm_eps=1e-5, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    logits = model(batch[:, :-1]).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def batch(step: int) -> np.ndarray:
    return np.random.default_rng(step).integers(0, V, (3, T + 1))


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
