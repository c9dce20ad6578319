"""Delayed scaling: what an operand is rounded under is known before it is.

An amax is the largest number of an operand. The gradient of a linear layer's scales (3,) is the
amaxes of its x, weight and dy: what is recomputed finds none twice. A step records them once, in a
history (3, HISTORY), the newest first, and its scales are those of the history before it.

Histories are in units of the whole batch's loss, not scaled: whatever the loss scale or the number
of processes, the same numbers are rounded. A step that is skipped records nothing.
"""

from typing import Any

import torch
from torch import Tensor, nn

from lockstep.formats.table import DELAYED

from ..mesh.processes import largest, process_count
from .rounding import power_of_two

Named = dict[str, Tensor]  # by linear layer


def give_scales(model: nn.Module, histories: Named, loss_scale: float) -> None:
    """Of each layer (3,), powers of two; 1 where nothing is recorded yet."""
    for name, history in histories.items():
        layer: Any = model.get_submodule(name)
        layer.scales = _scales(history, loss_scale).requires_grad_()


def _scales(history: Tensor, loss_scale: float) -> Tensor:
    given = units(history, loss_scale)
    sizes = history.amax(1) * given
    operands = zip(sizes, DELAYED.operands)
    known = [power_of_two(size, "up", to.largest) for size, to in operands if to]
    return torch.where(sizes > 0, torch.stack(known), power_of_two(given, "up", 1.0))


def units(history: Tensor, loss_scale: float) -> Tensor:
    """What is derived is the loss times its scale, and a device's loss a mean over its rows: dy is
    so many times that of the whole batch's loss."""
    return torch.tensor([1.0, 1.0, loss_scale * process_count()], device=history.device)


def take(model: nn.Module, histories: Named) -> Named:
    """The amaxes that a backward pass has left, which are then gone."""
    found: Named = {}
    for name, history in histories.items():
        layer: Any = model.get_submodule(name)
        left, layer.scales.grad = layer.scales.grad, None
        found[name] = torch.zeros_like(history[:, 0]) if left is None else left
    return found


def join(one: Named, other: Named) -> Named:
    """The amaxes of both, such as those of two micro-batches."""
    return {name: torch.maximum(one.get(name, found), found) for name, found in other.items()}


def record(histories: Named, found: Named, loss_scale: float) -> Named:
    """Amaxes (3,) of one step, before the others; what is not finite is no size."""
    named = {name: (history, found[name]) for name, history in histories.items()}
    return {name: _record(*each, loss_scale) for name, each in named.items()}


def _record(history: Tensor, found: Tensor, loss_scale: float) -> Tensor:
    found = largest(found) / units(history, loss_scale)
    found = torch.where(found.isfinite(), found, 0)
    return torch.cat([found[:, None], history[:, :-1]], dim=1)
