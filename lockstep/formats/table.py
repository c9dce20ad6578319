"""A table of all formats, and the format of each operand of a policy's matmuls.

Both twins and the reference read this table; none of them knows a format by name.
"""

import math
from dataclasses import dataclass, replace

LEAST_SCALE = 2.0**-100  # of a tensor that is zero or next to it
EXPONENT_OF_FLOAT32 = 8  # bits
HISTORY = 16  # steps whose largest numbers delayed scaling goes by


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format: its numbers, and which of them share a scale.

    Numbers share a scale in a "tensor", in a "row" (all that are added up in one element of a
    product), or in a "block" of so many neighbours in such a row. A scale is the least power of two
    under which nothing saturates.
    """

    exponent: int  # bits
    mantissa: int  # bits
    largest: float
    shared: str = ""  # who shares a scale; "": nobody has one
    block: int = 1  # numbers

    @property
    def lowest(self) -> int:
        """Returns the exponent of the smallest normal number, which subnormal ones share."""
        return 2 - 2 ** (self.exponent - 1)


def float32_bits(x: float) -> int:
    """Computes the bits of a positive normal float32, in operations that a compiler can trace."""
    fraction, exponent = math.frexp(x)
    return (exponent + 126 << 23) + int((2 * fraction - 1) * 2**23)


TF32 = Format(exponent=8, mantissa=10, largest=2.0**128 - 2.0**117)
E4M3 = Format(exponent=4, mantissa=3, largest=448.0, shared="tensor")
E5M2 = Format(exponent=5, mantissa=2, largest=57344.0, shared="tensor")

FORMATS = {
    "tf32": TF32,
    "fp8 e4m3": E4M3,
    "fp8 e5m2": E5M2,
    "fp8-rowwise e4m3": replace(E4M3, shared="row"),
    "fp8-rowwise e5m2": replace(E5M2, shared="row"),
    "mxfp8 e4m3": replace(E4M3, shared="block", block=32),
    "mxfp8 e5m2": replace(E5M2, shared="block", block=32),
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The formats of the operands of a linear layer's three matmuls.

    forward: x times weight; gradient of x: dy times weight; gradient of the weight: x times dy.
    """

    x: Format
    weight: Format
    dy: Format
    delayed: bool = False  # each scale is of the former steps' numbers, not of those that it scales
    native: bool = False  # multiplied by the device's own units

    @property
    def operands(self) -> tuple[Format, ...]:
        return self.x, self.weight, self.dy

    @property
    def block(self) -> int:
        """Returns the number of which the axes of all operands must be multiples."""
        return max(f.block for f in self.operands)


def _recipe(x: str, weight: str, dy: str) -> Recipe:
    return Recipe(x=FORMATS[x], weight=FORMATS[weight], dy=FORMATS[dy])


RECIPES = {
    "tf32": _recipe("tf32", "tf32", "tf32"),
    "fp8": _recipe("fp8 e4m3", "fp8 e4m3", "fp8 e5m2"),
    "fp8-delayed": replace(_recipe("fp8 e4m3", "fp8 e4m3", "fp8 e5m2"), delayed=True),
    "fp8-rowwise": _recipe("fp8-rowwise e4m3", "fp8-rowwise e4m3", "fp8-rowwise e5m2"),
    "mxfp8": _recipe("mxfp8 e4m3", "mxfp8 e4m3", "mxfp8 e5m2"),
}
DELAYED = RECIPES["fp8-delayed"]
# What units of NVIDIA's devices multiply, and the least compute capability that has them: fp8 with
# scales of a tensor or a row, which stay outside of the sum, from Ada on; blocks from Blackwell on.
UNITS = {
    **dict.fromkeys(("fp8", "fp8-delayed", "fp8-rowwise"), (8, 9)),
    "mxfp8": (10, 0),
}


def find_recipe(name: str) -> Recipe:
    """
    Raises:
        ValueError: the name is no recipe's.
    """
    if name not in RECIPES:
        raise ValueError(f"recipe {name!r}: unknown; use one of {', '.join(RECIPES)}")
    return RECIPES[name]


def native_recipes(capability: tuple[int, int] | None) -> frozenset[str]:
    """Lists the recipes that a device's units multiply; capability: NVIDIA's, None of others."""
    return frozenset(name for name, least in UNITS.items() if capability and capability >= least)
