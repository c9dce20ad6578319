"""JAX's commonest operations in numpy, on the host: nothing is compiled, which takes JAX longer
than to compute what a small program needs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

Function = Callable[..., Any]
DTYPES = ("float64", "int64", "int32", "bool")
ELEMENTWISE: dict[str, Function] = {
    "add": np.add, "add_any": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative,
    "max": np.maximum, "min": np.minimum, "exp": np.exp, "log": np.log, "log1p": np.log1p,
    "expm1": np.expm1, "tanh": np.tanh, "sqrt": np.sqrt, "square": np.square, "abs": np.abs,
    "sin": np.sin, "cos": np.cos, "sign": np.sign, "pow": np.power,
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "and": np.logical_and, "or": np.logical_or,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "select_n": lambda which, *cases: np.choose(np.asarray(which, np.intp), cases)
    if len(cases) > 2 else np.where(which, cases[-1], cases[0]),
    "stop_gradient": lambda x: x, "copy": lambda x: x, "copy_p": lambda x: x,
}  # fmt: skip
FLOATS: dict[str, Function] = {"div": np.divide}  # what rounds otherwise between integers
BOOLEANS = ("and", "or")  # bit by bit between integers


def _broadcast(x: Any, *, shape: Any, broadcast_dimensions: Any, **_: Any) -> np.ndarray:
    ones = [1] * len(shape)
    for axis, length in zip(broadcast_dimensions, np.shape(x)):
        ones[axis] = length
    return np.broadcast_to(np.reshape(x, ones), shape)


def _slice(x: Any, *, start_indices: Any, limit_indices: Any, strides: Any, **_: Any) -> np.ndarray:
    steps = strides or [1] * len(start_indices)
    return x[tuple(map(slice, start_indices, limit_indices, steps))]


def _dot_general(x: Any, y: Any, *, dimension_numbers: Any, **_: Any) -> np.ndarray:
    (sums, others), (batch, theirs) = dimension_numbers
    free = [k for k in range(x.ndim) if k not in (*sums, *batch)]
    rest = [k for k in range(y.ndim) if k not in (*others, *theirs)]
    shape = [x.shape[k] for k in (*batch, *free)] + [y.shape[k] for k in rest]
    length = int(np.prod([x.shape[k] for k in sums]))
    groups = [x.shape[k] for k in batch]
    a = x.transpose(*batch, *free, *sums).reshape(*groups, -1, length)
    b = y.transpose(*theirs, *others, *rest).reshape(*groups, length, -1)
    return (a @ b).reshape(shape)


WITH_PARAMETERS: dict[str, Function] = {
    "reshape": lambda x, new_sizes, **_: np.reshape(x, new_sizes),
    "transpose": lambda x, permutation, **_: np.transpose(x, permutation),
    "squeeze": lambda x, dimensions, **_: np.squeeze(x, tuple(dimensions)),
    "expand_dims": lambda x, dimensions, **_: np.expand_dims(x, tuple(dimensions)),
    "convert_element_type": lambda x, **_: x,
    "reduce_sum": lambda x, axes, **_: np.sum(x, tuple(axes)),
    "reduce_max": lambda x, axes, **_: np.max(x, tuple(axes)),
    "reduce_min": lambda x, axes, **_: np.min(x, tuple(axes)),
    "concatenate": lambda *x, dimension, **_: np.concatenate(x, dimension),
    "rev": lambda x, dimensions, **_: np.flip(x, tuple(dimensions)),
    "integer_pow": lambda x, y, **_: np.power(x, y) if y >= 0 else 1 / np.power(x, -y),
    "broadcast_in_dim": _broadcast, "slice": _slice, "dot_general": _dot_general,
}  # fmt: skip


def function_of(eqn: Any) -> Function | None:
    """Returns what computes an equation's result in numpy; None where only JAX can."""
    name, avals = eqn.primitive.name, [v.aval for v in (*eqn.invars, *eqn.outvars)]
    kinds = [str(getattr(aval, "dtype", "")) for aval in avals]
    if len(eqn.outvars) != 1 or any(kind not in DTYPES for kind in kinds):
        return None
    if name in ELEMENTWISE and (name not in BOOLEANS or set(kinds) == {"bool"}):
        made = ELEMENTWISE[name]
    elif name in FLOATS and set(kinds) == {"float64"}:
        made = FLOATS[name]
    elif name in WITH_PARAMETERS:
        made = partial(WITH_PARAMETERS[name], **eqn.params)
    else:
        return None

    def compute(*values: Any) -> np.ndarray:
        with np.errstate(all="ignore"):
            return np.asarray(made(*map(np.asarray, values)), kinds[-1])

    return compute
