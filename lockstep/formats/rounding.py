"""Rounding of float32 to the formats of `table`, for the arrays of any framework.

`NeutralRounding` says once what both twins do. A twin's subclass adds what its arrays have under
names of their own; `parity_tests` holds both to a definition in numpy.
"""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from lockstep.formats.table import DELAYED, E4M3, E5M2, LEAST_SCALE, Format, float32_bits

Array = Any
FLOAT8 = {E4M3.exponent: "float8_e4m3fn", E5M2.exponent: "float8_e5m2"}


class Shared(NamedTuple):
    """Numbers grouped with those that share a scale, and the scales."""

    numbers: Array  # an axis more, of those that share one, after that of the sum
    scale: Array  # 1 in the further axis; of a tensor (1, 1), and no axis more


class RoundedOperand(NamedTuple):
    """An operand of a product: as float32, or in the device's format with scales."""

    numbers: Array  # (M, N)
    scale: Array | None = None  # of a tensor or its rows, as (1, 1), (M, 1) or (1, N)
    blocks: Array | None = None  # scales of blocks along one axis, inside of the sum

    @property
    def mT(self) -> "RoundedOperand":
        scale, blocks = (None if each is None else each.mT for each in self[1:])
        return RoundedOperand(self.numbers.mT, scale, blocks)


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
    def amax(self, x: Array, axis: int | None, *, keep: bool = True) -> Array:
        """Computes the maximum along an axis, or of all numbers; `keep` keeps axes of length 1."""

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

    def quantize(self, x: Array, to: Format, axis: int, scale: Array | None = None) -> Array:
        """Quantizes float32 (M, N) as a matmul's operand in this format; returns float32.

        Args:
            axis: along which products are added up.
            scale: of the whole tensor, where it is known before.
        """
        if x.dtype != self.xp.float32:  # float64, of which a format holds the numbers as well
            scale = None if scale is None else self.cast(scale, "float32")
            rounded = self.quantize(self.cast(x, "float32"), to, axis, scale)
            return self.cast(rounded, x.dtype)
        if not to.shared or scale is not None:
            return self.round_to(x, to, scale)
        numbers, scale = self.share(x, to, axis)
        return self.round_to(numbers, to, scale).reshape(x.shape)

    def operand(
        self,
        x: Array,
        to: Format,
        axis: int,
        scale: Array | None = None,
        *,
        native: bool = False,
    ) -> RoundedOperand:
        """Quantizes as `quantize` does; `native`: to the device's own numbers."""
        if not native:
            return RoundedOperand(self.quantize(x, to, axis, scale))
        if scale is not None:
            return RoundedOperand(self.fit(x / scale, to), scale.reshape(1, 1))
        numbers, scale = self.share(x, to, axis)
        scales = scale if to.shared == "tensor" else scale.squeeze(axis % 2 + 1)
        fitting = self.fit(numbers / scale, to).reshape(x.shape)
        if to.shared == "block":
            return RoundedOperand(fitting, None, self.cast(scales, "float8_e8m0fnu"))
        return RoundedOperand(fitting, scales)

    def fit(self, x: Array, to: Format) -> Array:
        """Clips numbers and casts them to float8: beyond its largest number e4m3fn has only NaN."""
        return self.cast(self.xp.clip(x, -to.largest, to.largest), FLOAT8[to.exponent])

    def share(self, x: Array, to: Format, axis: int) -> Shared:
        """Groups x (M, N) for `quantize`, and computes the scales of its groups."""
        axis %= x.ndim
        length = {"tensor": 0, "row": x.shape[axis], "block": to.block}[to.shared]
        split = (*x.shape[:axis], -1, length, *x.shape[axis + 1 :]) if length else x.shape
        numbers = x.reshape(split)
        sizes = self.amax(abs(numbers), axis + 1 if length else None)
        if to.shared == "tensor" or (to.shared == "row" and axis == 0):  # with rows of all devices
            sizes = self.over_processes(sizes)
        return Shared(numbers, self.power_of_two(sizes, to.largest))

    # Delayed scaling: a history (3, HISTORY) has the amaxes of x, weight and dy, the newest first.

    def scales(self, history: Array, loss_scale: Any) -> Array:
        """Computes a layer's scales (3,), powers of two; 1 if no amax is recorded yet."""
        given = self.units(history, loss_scale)
        sizes = self.amax(history, 1, keep=False) * given
        operands = zip(sizes, DELAYED.operands)
        known = [self.power_of_two(size, to.largest) for size, to in operands]
        one = self.power_of_two(given, 1.0)
        return self.xp.where(sizes > 0, self.xp.stack(known), one)

    def record(self, history: Array, found: Array, loss_scale: Any) -> Array:
        """Puts a step's amaxes (3,) first in the histories; non-finite ones are recorded as 0."""
        found = found / self.units(history, loss_scale)
        found = self.xp.where(self.xp.isfinite(found), found, 0)
        return self.xp.concatenate([found[:, None], history[:, :-1]], 1)
