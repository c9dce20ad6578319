"""LoRA: a linear layer with a product of two narrow matrices added (Hu et al. 2021, 2106.09685)."""

from typing import Any

import torch
from torch import Tensor, nn

from ..model import Linear


class LoRALinear(Linear):
    """x W^T + b + alpha / rank * (x A^T) B^T, with A (rank, d_in) and B (d_out, rank)."""

    def __init__(self, d_in: int, d_out: int, *, rank: int, scale: float, **rest: Any) -> None:
        super().__init__(d_in, d_out, **rest)
        self.scale = scale
        self.lora_a = nn.Parameter(torch.zeros(rank, d_in))
        self.lora_b = nn.Parameter(torch.zeros(d_out, rank))

    def forward(self, x_RD: Tensor) -> Tensor:
        # Before the base: the last product of what remat recomputes is one that is not needed.
        added_RD = self.adapt(x_RD) * self.scale
        return super().forward(x_RD) + added_RD

    def adapt(self, x_RD: Tensor) -> Tensor:
        return self.product(self.product(x_RD, self.lora_a, None), self.lora_b, None)
