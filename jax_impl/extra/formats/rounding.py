"""float32 rounded to the formats of `lockstep.formats.table`, as its `reference` defines it."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.random import threefry_2x32

from lockstep.formats.draws import HALF_UNIT, SHARE, UNIT, halves
from lockstep.formats.table import E4M3, EXPONENT_OF_FLOAT32, LEAST_SCALE, Format, float32_bits

Draws = Array  # of each number, from 0 to 1


def round_to(x: Array, to: Format, scale: Array | None = None, draws: Draws | None = None) -> Array:
    """float32 of any shape -> float32: the nearest of the numbers of a format times a scale."""
    if to.exponent == EXPONENT_OF_FLOAT32:
        return _round_bits(x, to)
    scale = jnp.float32(1) if scale is None else scale
    step = jnp.maximum(_bits(x) & 0x7F800000, _bits(scale) + (to.lowest << 23))
    step = step - (to.mantissa << 23)
    steps = x * _number((254 << 23) - step)  # exact: powers of two
    if draws is None:
        whole = jnp.round(steps)
    else:
        down = jnp.floor(steps)
        whole = down + (draws < steps - down)
    rounded = whole * _number(step)
    if to.past == "saturate":
        most = to.largest * scale
        return jnp.clip(rounded, -most, most)
    return jnp.where(jnp.abs(rounded) > to.largest, jnp.copysign(jnp.inf, x), rounded)


def _round_bits(x: Array, to: Format) -> Array:
    """With all of float32's exponents: the mantissa carries into them, and to infinity."""
    cut = 23 - to.mantissa
    odd = _bits(x) >> cut & 1
    half = (1 << cut - 1) - (1 - odd if to.ties == "even" else 0)
    return jnp.where(jnp.isnan(x), x, _number((_bits(x) + half) & -(1 << cut)))


def power_of_two(size: Array, rule: str, at_most: float) -> Array:
    """The scale under which numbers up to `size` fit into those up to `at_most`."""
    most = float32_bits(at_most)
    carry = 0x7FFFFF - (most & 0x7FFFFF) if rule == "up" else 0
    exponent = (_bits(size) + carry & 0x7F800000) - (most & 0x7F800000) + (127 << 23)
    scale = jnp.maximum(_number(exponent), LEAST_SCALE)
    return jnp.where(jnp.isfinite(size), scale, jnp.inf)


def quantize(
    x: Array, to: Format | None, axis: int, draws: Draws | None = None, scale: Array | None = None
) -> Array:
    """float32 (M, N) -> what a matmul's operand in this format stands for.

    Args:
        axis: along which products are added up.
        scale: of the whole tensor, where it is known before.
    """
    if to is None:
        return x
    if x.dtype != jnp.float32:  # float64, of which a format holds the numbers as well
        scale = None if scale is None else scale.astype(jnp.float32)
        return quantize(x.astype(jnp.float32), to, axis, draws, scale).astype(x.dtype)
    if not to.shared or scale is not None:
        return round_to(x, to, scale)
    numbers, scale, whole = share(x, to, axis)
    drawn = None if draws is None else draws.reshape(numbers.shape)
    if whole is None:
        return round_to(numbers, to, scale, drawn).reshape(x.shape)
    return (round_to(numbers * (1 / scale), to, draws=drawn) * scale).reshape(x.shape)


class Shared(NamedTuple):
    """Numbers beside those that share a scale with them, and the scales."""

    numbers: Array  # an axis more, of those that share one, after that of the sum
    scale: Array  # 1 in the further axis; of a tensor (1, 1), and no axis more
    whole: Array | None = None  # (), the power of two of which the scales are e4m3 numbers


def share(x: Array, to: Format, axis: int) -> Shared:
    """x (M, N), as `quantize` has it, with the scales that its numbers ask for."""
    axis %= x.ndim
    length = {"tensor": 0, "row": x.shape[axis], "block": to.block}[to.shared]
    split = (*x.shape[:axis], -1, length, *x.shape[axis + 1 :]) if length else x.shape
    numbers = x.reshape(split)
    sizes = jnp.abs(numbers).max(axis + 1 if length else None, keepdims=True)
    if to.scale != "e4m3":
        return Shared(numbers, power_of_two(sizes, to.scale, to.largest))
    return Shared(numbers, *_scale_twice(sizes, to))


def _scale_twice(sizes: Array, to: Format) -> tuple[Array, Array]:
    """Each block's scale, rounded under the tensor's, and that; none becomes zero."""
    whole = power_of_two(sizes.max(), "up", to.largest * E4M3.largest)
    scale = round_to(sizes * to.reciprocal, E4M3, whole)
    return jnp.maximum(scale, E4M3.smallest * whole), whole


def draw(key: Array, shape: tuple[int, ...]) -> Draws:
    """Key: one of `jax.random`."""
    counts = jnp.arange(math.prod(shape) // SHARE, dtype=jnp.uint32)
    high, low = threefry_2x32(jax.random.key_data(key), jnp.stack([jnp.zeros_like(counts), counts]))
    words = jnp.stack(halves(high, low), axis=-1)
    return words.reshape(shape).astype(jnp.float32) * UNIT + HALF_UNIT


def _bits(x: Array) -> Array:
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def _number(bits: Array) -> Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
