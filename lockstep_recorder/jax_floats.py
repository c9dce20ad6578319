"""The float formats of a JAX program: which are narrower than float64, and how none is."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import core, dtypes
from jax._src.lax import lax as lax_internal

from lockstep_recorder import tree
from lockstep_recorder.noise import is_of_float32, is_short, spread_of_sum
from lockstep_recorder.operations import line_of
from lockstep_recorder.operations_jax import frames
from lockstep_recorder.written import Written

WIDE = (jnp.float64, jnp.complex128)
NARROWER = ("float32", "bfloat16", "float16", "complex64", "float8_e4m3fn", "float8_e5m2")


def narrow_operations(jaxpr: Any) -> Iterator[str]:
    """The operations that make a narrower float of a float64, in inner programs too."""
    for eqn in equations(jaxpr):
        wide = any(getattr(v.aval, "dtype", None) in WIDE for v in eqn.invars)
        for out in eqn.outvars:
            dtype = getattr(out.aval, "dtype", None)
            narrower = dtype is not None and jnp.issubdtype(dtype, jnp.inexact)
            if wide and narrower and dtype not in WIDE and out.aval.size > 1:
                yield f"{eqn.primitive.name} gives {dtype}"


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yields the equations of a program, those of inner programs too."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, (list, tuple)) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def note_formats(jaxpr: Any, written: Written) -> None:
    """Notes the formats of a program whose weights are in float64."""
    for eqn in equations(jaxpr):
        for out in eqn.outvars:
            dtype = str(getattr(out.aval, "dtype", ""))
            written.note(eqn.primitive.name, dtype, partial(_line_of, eqn))


def _line_of(eqn: Any) -> str:
    return line_of(frames(eqn))


def formats(jaxpr: Any) -> Iterator[str]:
    """The float formats of what the operations give."""
    for eqn in equations(jaxpr):
        for out in eqn.outvars:
            dtype = getattr(out.aval, "dtype", None)
            if dtype is not None and jnp.issubdtype(dtype, jnp.floating):
                yield str(dtype)


# What a dtype that a program asks for passes in a version of JAX; older ones have the second alone.
CANONICAL = ("check_and_canonicalize_user_dtype", "canonicalize_dtype")
CASTS = ("convert_element_type", "bitcast_convert_type")  # may be given a narrower float


def has_narrower(jaxpr: Any) -> bool:
    """Says if any value of a program is narrower than float64, or a literal that may have been."""
    values = [v for eqn in equations(jaxpr) for v in (*eqn.invars, *eqn.outvars)]
    literals = (np.asarray(v.val) for v in values if hasattr(v, "val"))
    return any(is_narrower(v.aval) for v in values) or any(
        x.dtype == np.float64 and is_of_float32(x) for x in literals
    )


@contextlib.contextmanager
def widened(formats: tuple[str, ...] = NARROWER, *, lowers: bool = False) -> Iterator[list[str]]:
    """Makes float64 of each float that a program makes, constants too, however it is written.

    A narrower one that others have made, such as numpy's, is cast where an operation is given it.
    JAX keeps what it has traced here apart by the precision of products, which has two names.

    Args:
        formats: those that become float64.
        lowers: a program is lowered, too, in which older versions of JAX ask for dtypes themselves.

    Yields:
        The floats that were cast though they are rounded.
    """
    bind, convert, cast = core.Primitive.bind, lax_internal._convert_element_type, list[str]()
    name = next(name for name in CANONICAL if hasattr(dtypes, name))
    canonical, is_asked_alone = getattr(dtypes, name), name == CANONICAL[0]

    def wide(x: Any) -> Any:
        """Returns the dtype in place of one; what is none as it is."""
        name = x.name if isinstance(x, np.dtype) else getattr(x, "__name__", "")
        return np.result_type(x, np.float64) if name in formats else x

    def widen(x: Any) -> Any:
        if str(getattr(x, "dtype", "")) not in formats:
            return x
        return widened_convert(x, np.result_type(x.dtype, np.float64))

    def widened_bind(self: Any, *args: Any, **params: Any) -> Any:
        if self.name not in CASTS:
            args = tuple(map(widen, args))
        if self.name != "bitcast_convert_type":
            params = {name: wide(x) for name, x in params.items()}
        return bind(self, *args, **params)

    def widened_convert(x: Any, dtype: Any = None, *args: Any, **options: Any) -> Any:
        if str(getattr(x, "dtype", "")) in formats:
            note_rounded(x, cast)
            if not is_asked_alone and isinstance(x, (np.ndarray, np.generic)):
                x = x.astype(wide(x.dtype))  # whose dtype is taken for the wide one
        return convert(x, wide(dtype), *args, **options)

    def widened_canonical(*args: Any, **options: Any) -> Any:
        dtype = canonical(*args, **options)
        return wide(dtype) if is_asked_alone or not lowers else dtype

    with (
        warnings.catch_warnings(),
        jax.default_matmul_precision("float32"),
        replaced(core.Primitive, "bind", widened_bind),
        replaced(lax_internal, "_convert_element_type", widened_convert),
        replaced(dtypes, name, widened_canonical),
    ):
        warnings.filterwarnings("ignore", "Explicitly requested dtype")  # of older versions
        yield cast


@contextlib.contextmanager
def rounded_constants() -> Iterator[list[str]]:
    """Yields the narrower floats of which float64 is made, but for those that are exact.

    Constants are computed while a program is traced; what is made of its arguments has no value
    then.
    """
    convert, found = lax_internal._convert_element_type, list[str]()

    def noting(x: Any, dtype: Any = None, *args: Any, **options: Any) -> Any:
        if dtype in WIDE and is_narrower(x):
            note_rounded(x, found)
        return convert(x, dtype, *args, **options)

    with replaced(lax_internal, "_convert_element_type", noting), jax.ensure_compile_time_eval():
        yield found


@contextlib.contextmanager
def replaced(place: Any, name: str, x: Any) -> Iterator[None]:
    former = getattr(place, name)
    setattr(place, name, x)
    try:
        yield
    finally:
        setattr(place, name, former)


def is_narrower(x: Any) -> bool:
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact) and dtype not in WIDE


def note_rounded(x: Any, found: list[str]) -> None:
    """Notes a narrower float, unless its values are short fractions."""
    if isinstance(x, jax.core.Tracer) or not is_short(tree.to_numpy(x).astype(np.float64)):
        found.append(f"{x.dtype} of shape {tuple(np.shape(x))}")


@contextlib.contextmanager
def moved_sums() -> Iterator[None]:
    """Moves sums as far as another order of adding moves them, up or down."""
    primitive = lax.reduce_sum_p
    bind = partial(type(primitive).bind, primitive)
    inside = False  # of a sum: its tangents are summed by the same primitive

    def moved_bind(x: Any, **params: Any) -> Any:
        nonlocal inside
        if inside:
            return bind(x, **params)
        inside = True
        try:
            return moved(x, params)
        finally:
            inside = False

    def moved(x: Any, params: dict[str, Any]) -> Any:
        y = bind(x, **params)
        if not (jnp.issubdtype(x.dtype, jnp.floating) and y.size):
            return y
        norm = jnp.sqrt(bind(lax.square(lax.stop_gradient(x)), **params))
        signs = 1.0 - 2.0 * (np.arange(y.size) * 7919 % 13 % 2).reshape(y.shape)
        spread = spread_of_sum(x.size // y.size, str(x.dtype))
        return y + (signs * norm * spread).astype(y.dtype)

    primitive.bind = moved_bind
    try:
        yield
    finally:
        del primitive.bind
