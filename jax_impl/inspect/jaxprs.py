"""Counts the FLOPs of a jaxpr."""

import math
from collections.abc import Iterator

from jax.extend import core
from jax.interpreters.partial_eval import dce_jaxpr


def flops(jaxpr: core.Jaxpr) -> int:
    """Counts the FLOPs of matmuls whose results are used, in inner programs, too."""
    jaxpr, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            shapes: list[tuple[int, ...]] = [
                variable.aval.shape  # type: ignore[attr-defined]
                for variable in (eqn.invars[0], eqn.outvars[0])
            ]
            left, product = shapes
            total += 2 * math.prod(left[axis] for axis in contracted) * math.prod(product)
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        total += times * sum(map(flops, inner_jaxprs(eqn)))
    return total


def inner_jaxprs(eqn: core.JaxprEqn) -> Iterator[core.Jaxpr]:
    """The programs that an equation calls."""
    for parameter in eqn.params.values():
        for value in parameter if isinstance(parameter, tuple | list) else [parameter]:
            if isinstance(value, core.ClosedJaxpr):
                yield value.jaxpr
            elif isinstance(value, core.Jaxpr):
                yield value
