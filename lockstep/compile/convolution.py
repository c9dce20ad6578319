"""A matmul as XLA writes it for a TPU: a convolution, whose windows stand for a batch."""

import re

from lockstep.compile.hlo import Instruction, Module

LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
FIELD = re.compile(r"(\w+)=([\d_x-]+)")


def conv_size(module: Module, conv: Instruction) -> tuple[int, int, int]:
    """Rows, columns, and all that is summed, of each window with something in it."""
    scope = module.computations[conv.computation]
    left, right = (scope[name].shapes[0].dims for name in conv.operands[:2])
    found = LABELS.search(conv.rest)
    assert found, conv.rest
    lhs, rhs, out = found.groups()
    made = conv.shapes[0].dims
    k = right[rhs.index("i")]
    fields = FIELD.findall(conv.attribute("window"))
    window = {name: value.split("x") for name, value in fields}  # a value for each axis
    for axis in range(len(made) - 2):
        number = str(axis)
        k *= _products(left[lhs.index(number)], made[out.index(number)],
                       {name: values[axis] for name, values in window.items()})  # fmt: skip
    return made[out.index("b")], made[out.index("f")], k


def _products(size: int, outputs: int, window: dict[str, str]) -> int:
    """Counts how often the window meets a number of the axis, over all its positions.

    The other positions are padding, or holes of a dilation.
    """
    stride, dilate, hole = (int(window.get(name, 1)) for name in ("stride", "rhs_dilate",
                                                                  "lhs_dilate"))  # fmt: skip
    low = int(window.get("pad", "0_0").partition("_")[0])
    taps = int(window.get("size", 1))
    places = (o * stride + tap * dilate - low for o in range(outputs) for tap in range(taps))
    return sum(at % hole == 0 and 0 <= at // hole < size for at in places)
