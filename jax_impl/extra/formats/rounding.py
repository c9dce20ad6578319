"""float32 rounded to the formats of `lockstep.formats.table`, in JAX."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from lockstep.formats import rounding
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

    def amax(self, x: Array, axis: int | None = None) -> Array:
        return x.max(axis)

    def units(self, history: Array, loss_scale: Any) -> Array:
        return jnp.array([1.0, 1.0, loss_scale], jnp.float32)

    def round_to(self, x: Array, to: Format, scale: Array | None = None) -> Array:
        if to.exponent == EXPONENT_OF_FLOAT32:
            return self.round_bits(x, to)
        scale = jnp.float32(1) if scale is None else scale
        step = jnp.maximum(self.bits(x) & 0x7F800000, self.bits(scale) + (to.lowest << 23))
        step = step - (to.mantissa << 23)
        steps = x * self.number((254 << 23) - step)  # exact: powers of two
        most = to.largest * scale
        return jnp.clip(jnp.round(steps) * self.number(step), -most, most)


ROUNDING = Rounding()
