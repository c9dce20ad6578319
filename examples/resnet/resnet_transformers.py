"""transformers' ResNet with random weights, small: a reference.

RESNET=50 makes it ResNet-50, and RESNET_AMP=1 runs it under autocast in bfloat16.
"""

import os

import numpy as np
import torch
from torch import Tensor, nn
from transformers import ResNetConfig, ResNetForImageClassification

FULL, AMP = os.environ.get("RESNET") == "50", os.environ.get("RESNET_AMP") == "1"
STEM, WIDTHS, DEPTHS = (64, (256, 512, 1024, 2048), (3, 4, 6, 3)) if FULL else (6, (12, 20), (1, 2))
K, B, S = (1000, 8, 64) if FULL else (5, 4, 16)  # classes, batch, side of an image


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    config = ResNetConfig(embedding_size=STEM, hidden_sizes=WIDTHS, depths=DEPTHS)
    config.num_labels = K
    model = ResNetForImageClassification(config)
    return model.train()


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=AMP):
        logits = model(batch["image"]).logits
    return nn.functional.cross_entropy(logits.to(batch["image"].dtype), batch["label"])


def batch(step: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(step)
    image = generator.normal(size=(B, 3, S, S)).astype(np.float32)
    return {"image": image, "label": generator.integers(0, K, B)}


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
