"""The float formats of a JAX program: which are narrower than float64, and how none is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from lockstep_recorder.noise import spread_of_sum
from lockstep_recorder.operations import line_of
from lockstep_recorder.operations_jax import frames
from lockstep_recorder.written import Written

WIDE = (jnp.float64, jnp.complex128)
ULPS = 4  # of float32, as in `torch_modes`
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


def rounded_values(jaxpr: Any) -> Iterator[str]:
    """The narrower floats of which float64 is made, such as a table that was made in float32."""
    for eqn in equations(jaxpr):
        if eqn.primitive is lax.convert_element_type_p:
            x, y = eqn.invars[0].aval, eqn.outvars[0].aval
            if y.dtype in WIDE and x.dtype not in WIDE and jnp.issubdtype(x.dtype, jnp.inexact):
                yield f"{x.dtype} of shape {x.shape}"


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


@contextlib.contextmanager
def nothing_narrower(
    formats: tuple[str, ...] = NARROWER, *, counts: bool = False
) -> Iterator[None]:
    """Keeps float64 where a program would make a narrower float of it, however it is written.

    Args:
        formats: those for which this holds.
        counts: makes float64 of integers, too, as of an optimizer's count of its steps.
    """

    def is_wide(x: Any) -> bool:
        dtype = getattr(x, "dtype", None)
        return dtype in WIDE or (
            counts and dtype is not None and jnp.issubdtype(dtype, jnp.integer)
        )

    changed = ((lax.convert_element_type_p, "new_dtype"), (lax.iota_p, "dtype"),
               (lax.dot_general_p, "preferred_element_type"))  # fmt: skip

    def widened(primitive: Any, option: str) -> Callable[..., Any]:
        bind = type(primitive).bind

        def widened_bind(*args: Any, **params: Any) -> Any:
            if (
                all(map(is_wide, args))
                and params[option] is not None
                and jnp.dtype(params[option]).name in formats
            ):
                params[option] = np.result_type(params[option], np.float64)
            return bind(primitive, *args, **params)

        return widened_bind

    for primitive, option in changed:
        primitive.bind = widened(primitive, option)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for primitive, _ in changed:
            del primitive.bind


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


@contextlib.contextmanager
def nudged_constants() -> Iterator[None]:
    """Moves a narrower float of which a float64 is made by some ulps of float32, up or down."""
    primitive = lax.convert_element_type_p
    former = vars(primitive).get("bind")  # that of `nothing_narrower`
    bind = former or partial(type(primitive).bind, primitive)

    def nudged_bind(x: Any, **params: Any) -> Any:
        y = bind(x, **params)
        narrow = str(getattr(x, "dtype", "")) in NARROWER
        if not narrow or y.dtype not in WIDE:
            return y
        signs = 1.0 - 2.0 * (np.arange(y.size) * 7919 % 13 % 2)
        return y * (1.0 + ULPS * 2.0**-23 * signs.reshape(y.shape))

    primitive.bind = nudged_bind
    try:
        yield
    finally:
        del primitive.bind
        if former:
            primitive.bind = former
