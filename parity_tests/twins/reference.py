"""Rounding by definition, in float64's numbers: what both twins are held against, bit for bit."""

from typing import Any

import numpy as np

from lockstep.formats.table import E4M3, EXPONENT_OF_FLOAT32, LEAST_SCALE, Format

Array = np.ndarray


def round_to(x: Array, to: Format, scale: Array | float = 1.0, draws: Array | None = None) -> Array:
    """float32 of any shape -> float32: the nearest of the numbers of a format times a scale.

    Infinities and NaNs stay.

    Args:
        scale: of each number, a power of two; infinite where one that shares it is not finite:
            then nothing else is left.
        draws: of each number, from 0 to 1, for a stochastic format.
    """
    finite = np.where(np.isfinite(x), x, np.float32(0))
    wide = finite / np.asarray(scale, np.float64)
    exponent = np.maximum(np.frexp(wide)[1] - 1, to.lowest)
    step = np.exp2(exponent - float(to.mantissa))
    steps = wide / step
    if to.stochastic:
        assert draws is not None
        whole = np.floor(steps) + (draws < (steps - np.floor(steps)).astype(np.float32))
    elif to.exponent == EXPONENT_OF_FLOAT32:  # TF32: ties go away from zero
        whole = np.copysign(np.floor(np.abs(steps) + 0.5), steps)
    else:
        whole = np.rint(steps)
    beyond = np.inf if to.exponent == EXPONENT_OF_FLOAT32 else to.largest
    size = np.where(np.abs(whole * step) > to.largest, beyond, np.abs(whole * step))
    size = size * np.where(np.isfinite(scale), scale, 0)
    return np.where(np.isfinite(x), np.copysign(size, whole).astype(np.float32), x)


def power_of_two(size: Any, at_most: float) -> Array:
    """The scale under which numbers up to `size` fit into those up to `at_most`."""
    wide = np.asarray(size, np.float64)
    mantissa, exponent = np.frexp(wide / at_most)
    exponent = exponent - (mantissa == 0.5)
    scale = np.maximum(np.exp2(np.where(wide > 0, exponent, -np.inf)), LEAST_SCALE)
    return np.where(np.isfinite(wide), scale, np.inf)


def quantize(x: Array, to: Format, axis: int, draws: Array | None = None) -> Array:
    """float32 (M, N) -> the numbers that a matmul's operand in this format stands for.

    Args:
        axis: along which products are added up.
        draws: as `round_to` has them.
    """
    if not to.shared:
        return round_to(x, to, draws=draws)
    axis %= x.ndim
    length = {"tensor": 0, "row": x.shape[axis], "block": to.block}[to.shared]
    split = (*x.shape[:axis], -1, length, *x.shape[axis + 1 :]) if length else x.shape
    blocks, drawn = x.reshape(split), None if draws is None else draws.reshape(split)
    sizes = np.abs(blocks).max(axis + 1 if length else None, keepdims=True)
    if to.scale == "e4m3":
        return _quantize_twice(blocks, sizes, to, drawn).reshape(x.shape)
    scale = power_of_two(sizes, to.largest)
    return round_to(blocks, to, scale, drawn).reshape(x.shape)


def _quantize_twice(x: Array, sizes: Array, to: Format, draws: Array | None) -> Array:
    """Each block's scale is rounded under the tensor's; none becomes zero."""
    whole = power_of_two(np.abs(x).max(), to.largest * E4M3.largest)
    scale = round_to(sizes * np.float32(1 / to.largest), E4M3, whole)
    scale = np.maximum(scale, np.float32(E4M3.smallest * whole))
    return round_to(x * (1 / scale), to, draws=draws) * scale
