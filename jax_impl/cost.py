"""What one optimizer step costs, counted."""

import math
from collections.abc import Iterator

import jax
from jax.extend import core

from jax_impl.step import Trainer


def step_bytes(trainer: Trainer, window: jax.Array) -> int:
    """XLA's temporaries, as the compiled step itself accounts for them; nothing is run."""
    step = trainer.jit(trainer.step_function, donate_argnums=0)
    accounts = step.lower(trainer.state, window).compile().memory_analysis()
    assert accounts is not None
    return accounts.temp_size_in_bytes


def step_flops(trainer: Trainer, window: jax.Array) -> int:
    """Two for each multiply-add of each matmul, recomputed ones too; traced, not run."""
    return _flops(jax.make_jaxpr(trainer.step_function)(trainer.state, window).jaxpr)


def _flops(jaxpr: core.Jaxpr) -> int:
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
        total += times * sum(map(_flops, inner_jaxprs(eqn)))
    return total


def inner_jaxprs(eqn: core.JaxprEqn) -> Iterator[core.Jaxpr]:
    """The programs that an equation calls."""
    for parameter in eqn.params.values():
        for value in parameter if isinstance(parameter, tuple | list) else [parameter]:
            if isinstance(value, core.ClosedJaxpr):
                yield value.jaxpr
            elif isinstance(value, core.Jaxpr):
                yield value
