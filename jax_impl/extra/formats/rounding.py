"""float32 rounded to the formats of `lockstep.formats.table`, in JAX."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.random import threefry_2x32

from lockstep.formats import rounding
from lockstep.formats.rounding import HALF_UNIT, SHARE, UNIT, Draws, halves
from lockstep.formats.table import EXPONENT_OF_FLOAT32, Format


class Rounding(rounding.NeutralRounding):
    """Rounds JAX's arrays."""

    xp = jnp

    def bits(self, x: Array) -> Array:
        return jax.lax.bitcast_convert_type(x, jnp.int32)

    def number(self, bits: Array) -> Array:
        return jax.lax.bitcast_convert_type(bits, jnp.float32)

    def cast(self, x: Array, kind: Any) -> Array:
        return x.astype(kind)

    def amax(self, x: Array, axis: int | None, *, keep: bool = True) -> Array:
        return x.max(axis, keepdims=keep)

    def units(self, history: Array, loss_scale: Any) -> Array:
        return jnp.array([1.0, 1.0, loss_scale], jnp.float32)

    def in_four_bits(self, x: Array) -> Array:
        return x.astype(jnp.float4_e2m1fn)

    def round_to(
        self, x: Array, to: Format, scale: Array | None = None, draws: Draws | None = None
    ) -> Array:
        if to.exponent == EXPONENT_OF_FLOAT32:
            return self.round_bits(x, to)
        scale = jnp.float32(1) if scale is None else scale
        step = jnp.maximum(self.bits(x) & 0x7F800000, self.bits(scale) + (to.lowest << 23))
        step = step - (to.mantissa << 23)
        steps = x * self.number((254 << 23) - step)  # exact: powers of two
        if draws is None:
            whole = jnp.round(steps)
        else:
            down = jnp.floor(steps)
            whole = down + (draws < steps - down)
        most = to.largest * scale
        return jnp.clip(whole * self.number(step), -most, most)


ROUNDING = Rounding()


def draw(key: Array, shape: tuple[int, ...]) -> Draws:
    """Draws a number for each of so many, by a key of `jax.random`."""
    counts = jnp.arange(math.prod(shape) // SHARE, dtype=jnp.uint32)
    high, low = threefry_2x32(jax.random.key_data(key), jnp.stack([jnp.zeros_like(counts), counts]))
    words = jnp.stack(halves(high, low), axis=-1)
    return words.reshape(shape).astype(jnp.float32) * UNIT + HALF_UNIT
