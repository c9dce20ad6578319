"""A table of all formats, and the format of each operand of a policy's matmuls.

Both twins and the reference read this table; none of them knows a format by name.
"""

import math
from dataclasses import dataclass, replace

LEAST_SCALE = 2.0**-100  # of a tensor that is zero or next to it
EXPONENT_OF_FLOAT32 = 8  # bits
HISTORY = 16  # steps whose largest numbers delayed scaling goes by
UNITS = (8, 9)  # the least compute capability of NVIDIA's whose units multiply fp8: Ada's


@dataclass(frozen=True, kw_only=True)
class Format:
    """A number format narrower than float32."""

    exponent: int  # bits
    mantissa: int  # bits
    largest: float

    @property
    def lowest(self) -> int:
        """Returns the exponent of the smallest normal number, which subnormal ones share."""
        return 2 - 2 ** (self.exponent - 1)

    @property
    def scaled(self) -> bool:
        """Says if a tensor has a scale, the least power of two under which nothing saturates."""
        return self.exponent < EXPONENT_OF_FLOAT32


def float32_bits(x: float) -> int:
    """Computes the bits of a positive normal float32, in operations that a compiler can trace."""
    fraction, exponent = math.frexp(x)
    return (exponent + 126 << 23) + int((2 * fraction - 1) * 2**23)


TF32 = Format(exponent=8, mantissa=10, largest=2.0**128 - 2.0**117)
E4M3 = Format(exponent=4, mantissa=3, largest=448.0)
E5M2 = Format(exponent=5, mantissa=2, largest=57344.0)


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


FP8 = Recipe(x=E4M3, weight=E4M3, dy=E5M2)
DELAYED = replace(FP8, delayed=True)
RECIPES = {"tf32": Recipe(x=TF32, weight=TF32, dy=TF32), "fp8": FP8, "fp8-delayed": DELAYED}


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
    has = capability is not None and capability >= UNITS
    return frozenset(("fp8", "fp8-delayed")) if has else frozenset()
