"""transformers' ResNet with random weights, small: a reference.

RESNET=50 makes it ResNet-50, RESNET=layers gives it those layers with few channels, and
RESNET_AMP=1 runs it under autocast in bfloat16.
"""

import os

import numpy as np
import torch
from torch import Tensor, nn
from transformers import ResNetConfig, ResNetForImageClassification

SIZE, AMP = os.environ.get("RESNET"), os.environ.get("RESNET_AMP") == "1"
STEM, K, B, S = 6, 5, 4, 16  # channels, classes, batch, side of an image
WIDTHS: tuple[int, ...] = (12, 20)
DEPTHS: tuple[int, ...] = (1, 2)
if SIZE == "50":
    STEM, K, B, S = 64, 1000, 8, 64
    WIDTHS, DEPTHS = (256, 512, 1024, 2048), (3, 4, 6, 3)
elif SIZE == "layers":
    WIDTHS, DEPTHS, S = (12, 16, 20, 24), (3, 4, 6, 3), 64


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
