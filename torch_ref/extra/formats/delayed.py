"""Delayed scaling: an operand is rounded under a scale that is known before the operand is.

An amax is the largest number of an operand. The gradient of a product's scales (3,) is the amaxes
of its x, weight and dy: so the backward pass hands them out, and what is recomputed finds none
twice. A step records them once, in a history (3, HISTORY), the newest first, and its scales are
those of the history before it.

Histories are in units of the whole batch's loss, not scaled: whatever the loss scale or the number
of processes, the same numbers are rounded. A step that is skipped records nothing.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from lockstep.formats.table import HISTORY, Recipe

from ...model import GPT
from .products import rounded_linear
from .rounding import Rounding

Named = dict[str, Tensor]  # by linear layer


class DelayedProduct(nn.Module):
    """Rows (R, in) @ weight (out, in) + bias (out), rounded under given scales.

    Its scales (3,), of x, weight and dy, are a plain tensor with a gradient: no parameter, so no
    optimizer moves them.
    """

    def __init__(self, recipe: Recipe, rounding: Rounding) -> None:
        super().__init__()
        self.recipe, self.rounding = recipe, rounding
        self.scales = torch.ones(3)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return rounded_linear(self.recipe, x, weight, bias, self.scales, self.rounding)


class Delayed:
    """Records a step's amaxes, and gives the model the scales that follow from them.

    Args:
        histories: the linear layers that have one.
        processes: the number of those whose losses' mean is the whole batch's.
    """

    def __init__(
        self, model: GPT, histories: Sequence[str], scaler: GradScaler, device: torch.device,
        rounding: Rounding, processes: int,
    ) -> None:  # fmt: skip
        self.model, self.scaler = model, scaler
        self.rounding, self.processes = rounding, processes
        self.amaxes = dict.fromkeys(histories, torch.zeros(3, HISTORY, device=device))
        self.found: Named = {}
        self.give_scales(model, self.amaxes)

    def give_scales(self, model: nn.Module, histories: Named) -> None:
        """Sets each layer's scales (3,). A device's loss is a mean over its own rows."""
        loss_scale = self.scaler.get_scale() * self.processes
        for name, history in histories.items():
            layer: Any = model.get_submodule(name)
            layer.product.scales = self.rounding.scales(history, loss_scale).requires_grad_()

    def begin_step(self) -> None:
        """Forgets the amaxes of what was no step."""
        take_amaxes(self.model, self.amaxes)
        self.found = {}

    def collect(self) -> None:
        """Takes the amaxes of a micro-batch."""
        self.found = join(self.found, take_amaxes(self.model, self.amaxes))

    def end_step(self, scale: float, *, skipped: bool) -> None:
        self.update_amaxes(self.found, scale, skipped=skipped)

    def update_amaxes(self, found: Named, scale: float, *, skipped: bool) -> None:
        """Records what this step has seen, unless it was skipped; sets the next step's scales."""
        if not skipped:
            for name, amaxes in found.items():
                largest = self.rounding.over_processes(amaxes)
                recorded = self.rounding.record(self.amaxes[name], largest, scale * self.processes)
                self.amaxes[name] = recorded
        self.give_scales(self.model, self.amaxes)


def take_amaxes(model: nn.Module, histories: Named) -> Named:
    """The amaxes that a backward pass has left, which are then gone."""
    found: Named = {}
    for name, history in histories.items():
        layer: Any = model.get_submodule(name)
        left, layer.product.scales.grad = layer.product.scales.grad, None
        found[name] = torch.zeros_like(history[:, 0]) if left is None else left
    return found


def join(one: Named, other: Named) -> Named:
    """The larger amaxes of two micro-batches."""
    return {name: torch.maximum(one.get(name, found), found) for name, found in other.items()}
