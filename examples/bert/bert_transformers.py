"""transformers' BERT for masked words, small: a reference. BERT=full gives it BERT's layers."""

import os

import numpy as np
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM

V, T, D, H, F, L = 59, 10, 24, 4, 40, 2  # vocabulary, positions, width, heads, mlp, layers
if os.environ.get("BERT") == "full":
    V, T, D, H, F, L = 300, 64, 96, 8, 200, 12


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=V, max_position_embeddings=T, hidden_size=D, num_attention_heads=H,
        intermediate_size=F, num_hidden_layers=L,
    )  # fmt: skip
    return BertForMaskedLM(config)


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(batch["words"], token_type_ids=batch["types"]).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def batch(step: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(step)
    words, targets = generator.integers(1, V, (2, 3, T))  # 0 is padding
    return {"words": words, "types": generator.integers(0, 2, (3, T)), "targets": targets}
