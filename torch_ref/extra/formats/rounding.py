"""float32 rounded to the formats of `lockstep.formats.table`, as its `reference` defines it."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.formats.draws import HALF_UNIT, SHARE, UNIT, halves
from lockstep.formats.table import E4M3, EXPONENT_OF_FLOAT32, LEAST_SCALE, Format, float32_bits
from lockstep.model.threefry import Key, encrypt

CACHED = 2**14  # counters whose words stay in a core's cache
Draws = Tensor  # of each number, from 0 to 1
Largest = Callable[[Tensor], Tensor]  # over the processes of a run, element by element


def of_one_process(x: Tensor) -> Tensor:
    return x


def round_to(
    x: Tensor, to: Format, scale: Tensor | None = None, draws: Draws | None = None
) -> Tensor:
    """float32 of any shape -> float32: the nearest of the numbers of a format times a scale."""
    if to.exponent == EXPONENT_OF_FLOAT32:
        return _round_bits(x, to)
    scale = torch.ones((), device=x.device) if scale is None else scale
    most = scale * to.largest * (1 if to.past == "saturate" else 2)
    y = torch.minimum(x, most)  # in place from here on: memory is what takes the time
    y.clamp_(min=-most)
    step = _number(_bits(y) & 0x7F800000)
    step.clamp_(min=scale * 2.0**to.lowest).mul_(2.0**-to.mantissa)
    if draws is None:  # what is added to a number so large is rounded to whole steps
        large = step.mul_(1.5 * 2.0**23)
        y.add_(large).sub_(large).copysign_(x)
    else:
        y.div_(step)  # exact: powers of two
        down = y.floor()
        y.sub_(down)
        y = down.add_(draws < y).mul_(step)
    if to.past == "saturate":
        return y
    return torch.where(y.abs() > to.largest, y.sign() * torch.inf, y)


def _round_bits(x: Tensor, to: Format) -> Tensor:
    """With all of float32's exponents: the mantissa carries into them, and to infinity."""
    cut = 23 - to.mantissa
    odd = _bits(x) >> cut & 1
    half = (1 << cut - 1) - (1 - odd if to.ties == "even" else 0)
    return torch.where(x.isnan(), x, _number((_bits(x) + half) & -(1 << cut)))


def power_of_two(size: Tensor, rule: str, at_most: float) -> Tensor:
    """The scale under which numbers up to `size` fit into those up to `at_most`."""
    most = float32_bits(at_most)
    carry = 0x7FFFFF - (most & 0x7FFFFF) if rule == "up" else 0
    exponent = (_bits(size) + carry & 0x7F800000) - (most & 0x7F800000) + (127 << 23)
    scale = _number(exponent).clamp_min(LEAST_SCALE)
    return torch.where(size.isfinite(), scale, torch.inf)


def quantize(
    x: Tensor,
    to: Format | None,
    axis: int,
    draws: Draws | None = None,
    scale: Tensor | None = None,
    largest: Largest = of_one_process,
) -> Tensor:
    """float32 (M, N) -> what a matmul's operand in this format stands for.

    Args:
        axis: along which products are added up.
        scale: of the whole tensor, where it is known before.
        largest: the maximum over all processes, of what they share a scale of.
    """
    if to is None:
        return x
    if x.dtype != torch.float32:  # float64, of which a format holds the numbers as well
        return quantize(x.to(torch.float32), to, axis, draws, scale, largest).to(x.dtype)
    if not to.shared or scale is not None:
        return round_to(x, to, scale)
    numbers, scale, whole = share(x, to, axis, largest)
    drawn = None if draws is None else draws.reshape(numbers.shape)
    if whole is None:
        return round_to(numbers, to, scale, drawn).reshape(x.shape)
    return round_to(numbers * (1 / scale), to, draws=drawn).mul_(scale).reshape(x.shape)


class Shared(NamedTuple):
    """Numbers beside those that share a scale with them, and the scales."""

    numbers: Tensor  # an axis more, of those that share one, after that of the sum
    scale: Tensor  # 1 in the further axis; of a tensor (1, 1), and no axis more
    whole: Tensor | None = None  # (), the power of two of which the scales are e4m3 numbers


def share(x: Tensor, to: Format, axis: int, largest: Largest = of_one_process) -> Shared:
    """x (M, N), as `quantize` has it, with the scales that its numbers ask for."""
    axis %= x.ndim
    length = {"tensor": 0, "row": x.shape[axis], "block": to.block}[to.shared]
    split = (*x.shape[:axis], -1, length, *x.shape[axis + 1 :]) if length else x.shape
    numbers = x.reshape(split)
    sizes = numbers.abs().amax(axis + 1 if length else (0, 1), keepdim=True)
    if to.shared == "tensor" or (to.shared == "row" and axis == 0):  # whose rows are of all devices
        sizes = largest(sizes)
    if to.scale != "e4m3":
        return Shared(numbers, power_of_two(sizes, to.scale, to.largest))
    return Shared(numbers, *_scale_twice(sizes, to, largest))


def _scale_twice(sizes: Tensor, to: Format, largest: Largest) -> tuple[Tensor, Tensor]:
    """Each block's scale, rounded under the tensor's, and that; none becomes zero."""
    whole = power_of_two(largest(sizes.max()), "up", to.largest * E4M3.largest)
    scale = round_to(sizes * to.reciprocal, E4M3, whole)
    return torch.maximum(scale, E4M3.smallest * whole), whole


def draw(key: Key, shape: torch.Size, device: torch.device, start: int = 0) -> Draws:
    """start: where these numbers begin in those of all devices."""
    if torch.compiler.is_compiling():  # some hundred integer operations: minutes to compile
        torch._dynamo.graph_break()
    counts = torch.arange(shape.numel() // SHARE, dtype=torch.int32, device=device)
    high, low = torch.zeros_like(counts), counts.add_(start // SHARE)
    for parts in zip(high.split(CACHED), low.split(CACHED)):
        encrypt(key, *parts)
    drawn = torch.stack(halves(high, low), dim=-1).float()
    return drawn.reshape(shape).mul_(UNIT).add_(HALF_UNIT)


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def _number(bits: Tensor) -> Tensor:
    return bits.view(torch.float32)
