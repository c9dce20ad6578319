"""float32 rounded to the formats of `lockstep.formats.table`, in PyTorch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lockstep.formats import rounding
from lockstep.formats.rounding import HALF_UNIT, SHARE, UNIT, Draws, halves
from lockstep.formats.table import EXPONENT_OF_FLOAT32, Format
from lockstep.model.threefry import Key, encrypt

CACHED = 2**14  # counters whose words stay in a core's cache
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

    def amax(self, x: Tensor, axis: int | None, *, keep: bool = True) -> Tensor:
        return x.amax(tuple(range(x.ndim)) if axis is None else axis, keepdim=keep)

    def units(self, history: Tensor, loss_scale: Any) -> Tensor:
        return torch.tensor([1.0, 1.0, loss_scale], device=history.device)

    def in_four_bits(self, x: Tensor) -> Tensor:
        """uint8: the sign above their place among 0, 0.5, 1, 1.5, 2, 3, 4, 6."""
        twice = (x.abs() * 2).to(torch.uint8)
        place = twice.clamp(max=4) + (twice > 4) + (twice > 6) + (twice > 8)
        return place | x.signbit().to(torch.uint8) << 3

    def round_to(
        self, x: Tensor, to: Format, scale: Tensor | None = None, draws: Draws | None = None
    ) -> Tensor:
        if to.exponent == EXPONENT_OF_FLOAT32:
            return self.round_bits(x, to)
        scale = torch.ones((), device=x.device) if scale is None else scale
        most = scale * to.largest
        y = torch.minimum(x, most)  # in place from here on: memory is what takes the time
        y.clamp_(min=-most)
        step = self.number(self.bits(y) & 0x7F800000)
        step.clamp_(min=scale * 2.0**to.lowest).mul_(2.0**-to.mantissa)
        if draws is None:  # what is added to a number so large is rounded to whole steps
            large = step.mul_(1.5 * 2.0**23)
            y.add_(large).sub_(large).copysign_(x)
        else:
            y.div_(step)  # exact: powers of two
            down = y.floor()
            y.sub_(down)
            y = down.add_(draws < y).mul_(step)
        return y


def draw(key: Key, shape: torch.Size, device: torch.device, start: int = 0) -> Draws:
    """Draws a number for each of so many.

    Args:
        start: where these numbers begin in those of all devices.
    """
    if torch.compiler.is_compiling():  # some hundred integer operations: minutes to compile
        torch._dynamo.graph_break()
    counts = torch.arange(shape.numel() // SHARE, dtype=torch.int32, device=device)
    high, low = torch.zeros_like(counts), counts.add_(start // SHARE)
    for parts in zip(high.split(CACHED), low.split(CACHED)):
        encrypt(key, *parts)
    drawn = torch.stack(halves(high, low), dim=-1).float()
    return drawn.reshape(shape).mul_(UNIT).add_(HALF_UNIT)
