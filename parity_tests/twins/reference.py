"""Rounding by definition, in float64's numbers: what both twins are held against, bit for bit."""

from typing import Any

import numpy as np

from lockstep.formats.table import EXPONENT_OF_FLOAT32, LEAST_SCALE, Format

Array = np.ndarray


def round_to(x: Array, to: Format, scale: Array | float = 1.0) -> Array:
    """float32 of any shape -> float32: the nearest of the numbers of a format times a scale.

    Infinities and NaNs stay.

    Args:
        scale: of each number, a power of two; infinite where one that shares it is not finite:
            then nothing else is left.
    """
    finite = np.where(np.isfinite(x), x, np.float32(0))
    wide = finite / np.asarray(scale, np.float64)
    exponent = np.maximum(np.frexp(wide)[1] - 1, to.lowest)
    step = np.exp2(exponent - float(to.mantissa))
    steps = wide / step
    if to.exponent == EXPONENT_OF_FLOAT32:  # TF32: ties go away from zero
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


def quantize(x: Array, to: Format) -> Array:
    """float32 -> the numbers that a matmul's operand in this format stands for."""
    scale = power_of_two(np.abs(x).max(), to.largest) if to.scaled else 1.0
    return round_to(x, to, scale)
