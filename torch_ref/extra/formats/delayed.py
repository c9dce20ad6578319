"""Delayed scaling: an operand is rounded under a scale that is known before the operand is.

An amax is the largest number of an operand. The gradient of a product's scales (3,) is the amaxes
of its x, weight and dy: so the backward pass hands them out, and what is recomputed finds none
twice. A step records them once, in a history (3, HISTORY), the newest first, and its scales are
those of the history before it.

Histories are in units of the whole batch's loss, not scaled: whatever the loss scale or the number
of processes, the same numbers are rounded. A step that is skipped records nothing.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.data.batch import Batch
from lockstep.formats.table import DELAYED, HISTORY, Recipe
from lockstep.twin import StepResult

from ... import step
from ...model import GPT
from .products import rounded_linear
from .rounding import Largest, of_one_process, power_of_two

Named = dict[str, Tensor]  # by linear layer


class DelayedProduct(nn.Module):
    """Rows (R, in) @ weight (out, in) + bias (out), rounded under given scales.

    Its scales (3,), of x, weight and dy, are a plain tensor with a gradient: no parameter, so no
    optimizer moves them.
    """

    def __init__(self, recipe: Recipe, largest: Largest) -> None:
        super().__init__()
        self.recipe, self.largest = recipe, largest
        self.scales = torch.ones(3)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return rounded_linear(self.recipe, x, weight, bias, None, self.scales, self.largest)


class Delayed(step.Trainer):
    """A trainer that records amaxes, and hands the model the scales that follow from them."""

    largest: Largest = staticmethod(of_one_process)  # over the processes of the run
    processes = 1

    def __init__(self, config: Any, model: GPT, device: torch.device) -> None:
        super().__init__(config, model, device)
        empty = torch.zeros(3, HISTORY, device=device)
        self.amaxes = dict.fromkeys(config.dtypes.histories, empty)
        self.give_scales(model, self.amaxes)

    def give_scales(self, model: nn.Module, histories: Named) -> None:
        give_scales(model, histories, self.scaler.get_scale() * self.processes)

    def step(self, window: Batch) -> Callable[[], StepResult]:
        scale, updates = self.scaler.get_scale(), self.updates
        take_amaxes(self.model, self.amaxes)  # those of what was no step
        self.found: Named = {}
        wait = super().step(window)
        self.update_amaxes(self.found, scale, skipped=self.updates == updates)
        return wait

    def micro_batch(self, window: Batch, over: Tensor | None, micro_step: int) -> Tensor:
        loss = super().micro_batch(window, over, micro_step)
        self.found = join(self.found, take_amaxes(self.model, self.amaxes))
        return loss

    def update_amaxes(self, found: Named, scale: float, *, skipped: bool) -> None:
        """Records what this step has seen, unless it was skipped; sets the next step's scales."""
        if not skipped:
            named = {name: self.largest(amaxes) for name, amaxes in found.items()}
            self.amaxes = record(self.amaxes, named, scale * self.processes)
        self.give_scales(self.model, self.amaxes)


def give_scales(model: nn.Module, histories: Named, loss_scale: float) -> None:
    """Sets each layer's scales (3,), powers of two; 1 where nothing is recorded yet."""
    for name, history in histories.items():
        layer: Any = model.get_submodule(name)
        layer.product.scales = _scales(history, loss_scale).requires_grad_()


def _scales(history: Tensor, loss_scale: float) -> Tensor:
    given = units(history, loss_scale)
    sizes = history.amax(1) * given
    operands = zip(sizes, DELAYED.operands)
    known = [power_of_two(size, "up", to.largest) for size, to in operands if to]
    return torch.where(sizes > 0, torch.stack(known), power_of_two(given, "up", 1.0))


def units(history: Tensor, loss_scale: float) -> Tensor:
    """The loss that is derived is scaled, and a device's loss is a mean over its own rows: dy is
    so many times that of the whole batch's loss."""
    return torch.tensor([1.0, 1.0, loss_scale], device=history.device)


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


def record(histories: Named, found: Named, loss_scale: float) -> Named:
    """Puts the amaxes (3,) of one step before the others; what is not finite is no size."""
    named = {name: (history, found[name]) for name, history in histories.items()}
    return {name: _record(*each, loss_scale) for name, each in named.items()}


def _record(history: Tensor, found: Tensor, loss_scale: float) -> Tensor:
    found = found / units(history, loss_scale)
    found = torch.where(found.isfinite(), found, 0)
    return torch.cat([found[:, None], history[:, :-1]], dim=1)
