"""A table of all formats, and the format of each operand of a policy's matmuls.

Both twins and the reference read this table; none of them knows a format by name.
"""

import math
import struct
from dataclasses import dataclass, field, replace

LEAST_SCALE = 2.0**-100  # of a tensor that is zero or next to it
EXPONENT_OF_FLOAT32 = 8  # bits
HISTORY = 16  # steps whose largest numbers delayed scaling goes by


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format: its numbers, and which of them share a scale.

    Numbers share a scale in a "tensor", in a "row" (all that are added up in one element of a
    product), or in a "block" of so many neighbours in such a row.
    """

    exponent: int  # bits
    mantissa: int  # bits
    largest: float
    shared: str = ""  # who shares a scale; "": nobody has one
    block: int = 1  # numbers
    # "up": the least power of two under which nothing saturates. "e4m3": of a block an e4m3
    # number, times the least power of two for the whole tensor.
    scale: str = "up"
    stochastic: bool = False  # up or down at random, the nearer the likelier
    reciprocal: float = field(init=False)  # of the largest, in float32

    def __post_init__(self) -> None:
        (reciprocal,) = struct.unpack("f", struct.pack("f", 1 / self.largest))
        object.__setattr__(self, "reciprocal", reciprocal)

    @property
    def lowest(self) -> int:
        """Returns the exponent of the smallest normal number, which subnormal ones share."""
        return 2 - 2 ** (self.exponent - 1)

    @property
    def smallest(self) -> float:
        """Returns the smallest positive number."""
        return 2.0 ** (self.lowest - self.mantissa)


def float32_bits(x: float) -> int:
    """Computes the bits of a positive normal float32, in operations that a compiler can trace."""
    fraction, exponent = math.frexp(x)
    return (exponent + 126 << 23) + int((2 * fraction - 1) * 2**23)


TF32 = Format(exponent=8, mantissa=10, largest=2.0**128 - 2.0**117)
E4M3 = Format(exponent=4, mantissa=3, largest=448.0, shared="tensor")
E5M2 = Format(exponent=5, mantissa=2, largest=57344.0, shared="tensor")
E2M1 = Format(exponent=2, mantissa=1, largest=6.0, shared="tensor")

NVFP4 = replace(E2M1, shared="block", block=16, scale="e4m3")

FORMATS = {
    "tf32": TF32,
    "fp8 e4m3": E4M3,
    "fp8 e5m2": E5M2,
    "fp8-rowwise e4m3": replace(E4M3, shared="row"),
    "fp8-rowwise e5m2": replace(E5M2, shared="row"),
    "mxfp8 e4m3": replace(E4M3, shared="block", block=32),
    "mxfp8 e5m2": replace(E5M2, shared="block", block=32),
    "nvfp4": NVFP4,
    "nvfp4 stochastic": replace(NVFP4, stochastic=True),
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The formats of the operands of a linear layer's three matmuls; None: as they are.

    forward: x times weight; gradient of x: dy times weight; gradient of the weight: x times dy.
    """

    x: Format | None
    weight: Format | None
    dy: Format | None
    delayed: bool = False  # each scale is of the former steps' numbers, not of those that it scales
    native: bool = False  # multiplied by the device's own units

    @property
    def operands(self) -> tuple[Format | None, ...]:
        return self.x, self.weight, self.dy

    @property
    def bits(self) -> int:
        """Returns the bits of the widest operand, sign included."""
        return max(1 + f.exponent + f.mantissa for f in self.operands if f)

    @property
    def block(self) -> int:
        """Returns the number of which the axes of all operands must be multiples."""
        return max((f.block for f in self.operands if f), default=1)


def _recipe(x: str, weight: str, dy: str) -> Recipe:
    return Recipe(x=FORMATS[x], weight=FORMATS[weight], dy=FORMATS[dy])


RECIPES = {
    "tf32": _recipe("tf32", "tf32", "tf32"),
    "fp8": _recipe("fp8 e4m3", "fp8 e4m3", "fp8 e5m2"),
    "fp8-delayed": replace(_recipe("fp8 e4m3", "fp8 e4m3", "fp8 e5m2"), delayed=True),
    "fp8-rowwise": _recipe("fp8-rowwise e4m3", "fp8-rowwise e4m3", "fp8-rowwise e5m2"),
    "mxfp8": _recipe("mxfp8 e4m3", "mxfp8 e4m3", "mxfp8 e5m2"),
    "nvfp4": _recipe("nvfp4", "nvfp4", "nvfp4 stochastic"),
}
DELAYED = RECIPES["fp8-delayed"]
# What units of NVIDIA's devices multiply, and the least compute capability that has them: fp8 with
# scales of a tensor or a row, which stay outside of the sum, from Ada on; blocks from Blackwell on.
UNITS = {
    **dict.fromkeys(("fp8", "fp8-delayed", "fp8-rowwise"), (8, 9)),
    **dict.fromkeys(("mxfp8", "nvfp4"), (10, 0)),
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
