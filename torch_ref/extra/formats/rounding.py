"""float32 rounded to the formats of `lockstep.formats.table`, in PyTorch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lockstep.formats import rounding
from lockstep.formats.table import EXPONENT_OF_FLOAT32, Format

Largest = Callable[[Tensor], Tensor]  # over the processes of a run, element by element


class Rounding(rounding.NeutralRounding):
    """Rounds PyTorch's tensors.

    Args:
        largest: the maximum over all processes, of what they share a scale of; None: of one.
    """

    xp = torch

    def __init__(self, largest: Largest | None = None) -> None:
        self.largest = largest

    def over_processes(self, x: Tensor) -> Tensor:
        return x if self.largest is None else self.largest(x)

    def bits(self, x: Tensor) -> Tensor:
        return x.view(torch.int32)

    def number(self, bits: Tensor) -> Tensor:
        return bits.view(torch.float32)

    def cast(self, x: Tensor, kind: Any) -> Tensor:
        return x.to(getattr(torch, kind) if isinstance(kind, str) else kind)

    def amax(self, x: Tensor, axis: int | None = None) -> Tensor:
        return x.amax(axis) if axis is not None else x.amax()

    def units(self, history: Tensor, loss_scale: Any) -> Tensor:
        return torch.tensor([1.0, 1.0, loss_scale], device=history.device)

    def round_to(self, x: Tensor, to: Format, scale: Tensor | None = None) -> Tensor:
        if to.exponent == EXPONENT_OF_FLOAT32:
            return self.round_bits(x, to)
        scale = torch.ones((), device=x.device) if scale is None else scale
        most = scale * to.largest
        y = torch.minimum(x, most)  # in place from here on: memory is what takes the time
        y.clamp_(min=-most)
        step = self.number(self.bits(y) & 0x7F800000)
        step.clamp_(min=scale * 2.0**to.lowest).mul_(2.0**-to.mantissa)
        large = step.mul_(1.5 * 2.0**23)  # what is added to it is rounded to whole steps
        return y.add_(large).sub_(large).copysign_(x)
