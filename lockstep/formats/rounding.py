"""Rounding of float32 to the formats of `table`, for the arrays of any framework.

`NeutralRounding` says once what both twins do. A twin's subclass adds what its arrays have under
names of their own; `parity_tests` holds both to a definition in numpy.
"""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from lockstep.formats.table import DELAYED, E4M3, E5M2, LEAST_SCALE, Format, float32_bits

Array = Any
FLOAT8 = {E4M3.exponent: "float8_e4m3fn", E5M2.exponent: "float8_e5m2"}


class RoundedOperand(NamedTuple):
    """An operand of a product: as float32, or in the device's format with a scale."""

    numbers: Array  # (M, N)
    scale: Array | None = None  # ()

    @property
    def mT(self) -> "RoundedOperand":
        return self._replace(numbers=self.numbers.mT)


class NeutralRounding(ABC):
    """Rounds arrays of one framework.

    Attributes:
        xp: the framework's module of functions, such as `jax.numpy`.
    """

    xp: Any

    # What a subclass adds.

    @abstractmethod
    def bits(self, x: Array) -> Array:
        """Returns the bits of float32 numbers as int32."""

    @abstractmethod
    def number(self, bits: Array) -> Array:
        """Returns the float32 numbers with these bits."""

    @abstractmethod
    def cast(self, x: Array, kind: Any) -> Array:
        """Casts to a dtype, or to the dtype of a name."""

    @abstractmethod
    def amax(self, x: Array, axis: int | None = None) -> Array:
        """Computes the maximum along an axis, or of all numbers."""

    @abstractmethod
    def units(self, history: Array, loss_scale: Any) -> Array:
        """Returns float32 (3,) for a history: the units of the amaxes of x, weight and dy.

        The loss that is derived is scaled: dy is so many times that of the loss itself.
        """

    @abstractmethod
    def round_to(self, x: Array, to: Format, scale: Array | None = None) -> Array:
        """Rounds float32 of any shape to the nearest number of a format times a scale.

        What is beyond the largest number saturates; in TF32 it becomes infinite.
        """

    def over_processes(self, x: Array) -> Array:
        """Computes the maximum over the processes of a run, if each has its own rows."""
        return x

    # What follows from it.

    def round_bits(self, x: Array, to: Format) -> Array:
        """Rounds mantissas with all of float32's exponents, carrying into them and to infinity.

        Ties go away from zero, as in TF32.
        """
        cut = 23 - to.mantissa
        rounded = self.number((self.bits(x) + (1 << cut - 1)) & -(1 << cut))
        return self.xp.where(self.xp.isnan(x), x, rounded)

    def power_of_two(self, size: Array, at_most: float) -> Array:
        """Computes the least power of two that scales numbers up to `size` to at most `at_most`."""
        most = float32_bits(at_most)
        carry = 0x7FFFFF - (most & 0x7FFFFF)
        exponent = (self.bits(size) + carry & 0x7F800000) - (most & 0x7F800000) + (127 << 23)
        scale = self.xp.clip(self.number(exponent), min=LEAST_SCALE)
        return self.xp.where(self.xp.isfinite(size), scale, self.xp.inf)

    def quantize(self, x: Array, to: Format, scale: Array | None = None) -> Array:
        """Quantizes float32 as a matmul's operand in this format; returns float32.

        Args:
            scale: of the tensor, where it is known before.
        """
        if x.dtype != self.xp.float32:  # float64, of which a format holds the numbers as well
            scale = None if scale is None else self.cast(scale, "float32")
            rounded = self.quantize(self.cast(x, "float32"), to, scale)
            return self.cast(rounded, x.dtype)
        if to.scaled and scale is None:
            scale = self.find_scale(x, to)
        return self.round_to(x, to, scale)

    def operand(
        self, x: Array, to: Format, scale: Array | None = None, *, native: bool = False
    ) -> RoundedOperand:
        """Quantizes as `quantize` does; `native`: to the device's own numbers."""
        if not native:
            return RoundedOperand(self.quantize(x, to, scale))
        scale = self.find_scale(x, to) if scale is None else scale
        return RoundedOperand(self.fit(x / scale, to), scale)

    def fit(self, x: Array, to: Format) -> Array:
        """Clips numbers and casts them to float8: beyond its largest number e4m3fn has only NaN."""
        return self.cast(self.xp.clip(x, -to.largest, to.largest), FLOAT8[to.exponent])

    def find_scale(self, x: Array, to: Format) -> Array:
        """Computes the scale () of a tensor: the least power of two under which none saturates."""
        return self.power_of_two(self.over_processes(self.amax(abs(x))), to.largest)

    # Delayed scaling: a history (3, HISTORY) has the amaxes of x, weight and dy, the newest first.

    def scales(self, history: Array, loss_scale: Any) -> Array:
        """Computes a layer's scales (3,), powers of two; 1 if no amax is recorded yet."""
        given = self.units(history, loss_scale)
        sizes = self.amax(history, 1) * given
        operands = zip(sizes, DELAYED.operands)
        known = [self.power_of_two(size, to.largest) for size, to in operands]
        one = self.power_of_two(given, 1.0)
        return self.xp.where(sizes > 0, self.xp.stack(known), one)

    def record(self, history: Array, found: Array, loss_scale: Any) -> Array:
        """Puts a step's amaxes (3,) first in the histories; non-finite ones are recorded as 0."""
        found = found / self.units(history, loss_scale)
        found = self.xp.where(self.xp.isfinite(found), found, 0)
        return self.xp.concatenate([found[:, None], history[:, :-1]], 1)
