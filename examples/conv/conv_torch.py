"""A small residual convolutional net with batch normalization in PyTorch: a reference."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

C, S, K, B = 6, 8, 5, 4  # channels, side of an image, classes, batch


class Block(nn.Module):
    def __init__(self, i: int, o: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(i, o, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(o)
        self.conv2 = nn.Conv2d(o, o, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(o)
        self.downsample = nn.Conv2d(i, o, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.downsample(x) + self.bn2(self.conv2(y)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, C, 3, padding=1)
        self.layers = nn.ModuleList([Block(C, C, 1), Block(C, 2 * C, 2)])
        self.fc = nn.Linear(2 * C, K)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.stem(x), 2)
        for block in self.layers:
            x = block(x)
        return self.fc(x.mean((2, 3)))


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Net()


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["image"]), batch["label"])


def batch(step: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(step)
    image = generator.normal(size=(B, 3, S, S)).astype(np.float32)
    return {"image": image, "label": generator.integers(0, K, B)}


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
