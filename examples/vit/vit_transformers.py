"""transformers' ViT for classes, small: a reference. VIT=full gives it ViT's layers."""

import os

import numpy as np
import torch
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

S, P, D, H, F, L, K = 8, 4, 24, 3, 40, 2, 5  # side, patch, width, heads, mlp, layers, classes
if os.environ.get("VIT") == "full":
    S, P, D, H, F, L, K = 32, 8, 96, 6, 200, 12, 10


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    config = ViTConfig(
        image_size=S, patch_size=P, hidden_size=D, num_attention_heads=H, intermediate_size=F,
        num_hidden_layers=L,
    )  # fmt: skip
    config.num_labels = K
    return ViTForImageClassification(config)


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["image"]).logits, batch["label"])


def batch(step: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(step)
    image = generator.normal(size=(4, 3, S, S)).astype(np.float32)
    return {"image": image, "label": generator.integers(0, K, 4)}
