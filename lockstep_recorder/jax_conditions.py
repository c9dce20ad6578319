"""Notes how the conditions of a JAX program come out, as `conditions` does of Python's: what a
compiled program returns of them beside its results."""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import core

from lockstep_recorder.conditions import Conditions
from lockstep_recorder.jax_floats import replaced
from lockstep_recorder.user import is_users

COMPARES = ("lt", "le", "gt", "ge")
LIMITS = {"max": "below", "min": "above"}  # what `jnp.clip` is made of
# What makes large whole numbers of small ones.
GROWS = {"add", "sub", "mul", "dot_general", "reduce_sum", "reduce_prod", "cumsum", "cumprod",
         "integer_pow", "shift_left", "scatter-add"}  # fmt: skip
WRAPS = "whole numbers  "  # before a place
WATCHED = {*COMPARES, *LIMITS, "is_finite", "clamp"}
BOUNDED = ("relu6", "hard_tanh", "hard_sigmoid", "hard_silu", "hard_swish")  # of jax.nn
OPTAX = ("_clipping.py", "clipping.py", "_conditionality.py", "wrappers.py", "_constraining.py",
         "constrain.py")  # fmt: skip
HERE = os.path.dirname(os.path.abspath(__file__))
JAX = os.path.dirname(os.path.dirname(os.path.abspath(jax.__file__)))
# Of JAX, between a program's line and an operation: not what computes a function of its own.
PASSING = ("core", "numpy", "lax", "traceback_util.py", "api.py", "api_util.py", "pjit.py",
           "profiler.py", "linear_util.py", "util.py", "dtypes.py", "custom_derivatives.py",
           "interpreters", "array.py", "core.py", "named_call.py", "source_info_util.py",
           "ad_checkpoint.py")  # fmt: skip
Found = dict[str, Any]  # by place: rows of (came out true, came out false, *what it looks at)


@contextlib.contextmanager
def watched(found: Found, is_own: Callable[[Any], bool]) -> Iterator[None]:
    """Adds what comes out of comparisons of floats, limits and masks while a program is traced.

    Args:
        is_own: says of a value if it may be returned: it is not one of an inner program.
    """
    bind, inside = core.Primitive.bind, False

    def watched_bind(self: Any, *args: Any, **params: Any) -> Any:
        nonlocal inside
        y = bind(self, *args, **params)
        grows = self.name in GROWS and getattr(y, "dtype", None) == jnp.int64
        known = grows or self.name in WATCHED or _is_isnan(self.name, args)
        if inside or not known or not any(isinstance(x, core.Tracer) for x in args):
            return y
        watches = grows or _are_floats(args)
        if not all(map(is_own, (*args, y))) or not watches or not (place := _place()):
            return y
        inside = True
        try:
            if grows:
                beyond = _is_beyond(y) & ~functools.reduce(jnp.logical_or, map(_is_beyond, args))
                found.setdefault(WRAPS + place, []).append(jnp.stack([beyond, ~beyond]))
                return y
            for at, mask, looked_at in _outcomes(self.name, place, args, y):
                rows = [jnp.any(mask), jnp.any(~mask), *map(jnp.max, looked_at)]
                found.setdefault(at, []).append(jax.lax.stop_gradient(jnp.stack(rows)))
        finally:
            inside = False
        return y

    with replaced(core.Primitive, "bind", watched_bind):
        yield


def _is_beyond(x: Any) -> Any:
    """Says if a whole number of an array is none of int32."""
    least, most = (getattr(np.iinfo(np.int32), name) for name in ("min", "max"))
    return jnp.any((x < least) | (x > most))


def _is_isnan(name: str, args: Any) -> bool:
    return name == "ne" and args[0] is args[1]


def _are_floats(args: Any) -> bool:
    return all(jnp.issubdtype(jnp.result_type(x), jnp.floating) and np.size(x) for x in args)


def _outcomes(name: str, place: str, args: Any, y: Any) -> Iterator[tuple[str, Any, list[Any]]]:
    """Yields what an operation decides: its place, where that is true, and what it looks at."""
    if name in COMPARES or name in ("is_finite", "ne"):
        yield place, y, [*args]
    elif name == "clamp":
        least, x, most = args
        yield f"{place}  (below)", x < least, [x, least]
        yield f"{place}  (above)", x > most, [x, most]
    else:
        x, limit = args
        yield f"{place}  ({LIMITS[name]})", x < limit if name == "max" else x > limit, [x, limit]


def _place() -> str:
    """Returns the line of the user's program that calls an operation, or optax's function of it; ""
    where another function of a library does."""
    frame = sys._getframe(3)
    while frame is not None:
        code = frame.f_code
        file, function = code.co_filename, getattr(code, "co_qualname", code.co_name)  # from 3.11
        inner = os.path.relpath(file, JAX).split(os.sep) if file.startswith(JAX) else []
        if is_users(file):
            text = linecache.getline(file, frame.f_lineno).strip()
            return f"{os.path.basename(file)}:{frame.f_lineno}  {text}"
        if inner[:1] == ["optax"]:
            name = function.partition(".")[0]
            return f"optax  {name}" if inner[-1] in OPTAX else ""
        known = inner[:2] == ["jax", "_src"] and (
            inner[2] in PASSING or (inner[2] == "nn" and function in BOUNDED))  # fmt: skip
        if not known and not file.startswith(HERE) and inner[:1] != ["contextlib.py"]:
            return ""
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def note(conditions: Conditions, found: dict[str, Any]) -> None:
    """Notes what a run of a compiled program returned."""
    for place, rows in found.items() if conditions.on else ():
        for row in rows:
            if place.startswith(WRAPS):
                conditions.wraps |= {place.removeprefix(WRAPS)} if row[0] else set()
                continue
            true, false, *given = np.asarray(row, float).tolist()
            conditions.note(place, [True] * bool(true) + [False] * bool(false), *given)
