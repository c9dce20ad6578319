"""The state of a step without side effects, and the model as a function of its parameters."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from lockstep.data.batch import Batch

from .model import GPT

Params = dict[str, Array]  # flat, so that dispatch costs no walk through a tree in Python


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """The training state that a step takes and returns."""

    params: Params
    optimizer: Any  # moments of the trained parameters, and accumulated gradients
    loss_scale: Array
    good_steps: Array  # since the loss scale last changed
    step: Array
    amaxes: Params = field(default_factory=dict)  # histories of delayed scaling


class Metrics(NamedTuple):
    """The numbers that a step reports to the host."""

    loss: Array
    grad_norm: Array
    updates: Array  # before this one: the position in the learning rate's schedule
    loss_scale: Array
    skipped: Array
    norms: Array  # (P,), by tensor; NaN where a skipped step's gradient is not finite


class PureGPT:
    """Holds the structure of a GPT; called with parameters, it returns the GPT."""

    def __init__(self, make: Callable[[], GPT]) -> None:
        """Traces `make`, so that no parameter is allocated."""
        self.graph, state = nnx.split(nnx.eval_shape(make))
        self.variables = {".".join(map(str, p)): (p, x) for p, x in nnx.to_flat_state(state)}
        params = {name: x for name, (_, x) in self.variables.items() if isinstance(x, nnx.Param)}
        self.shapes = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in params.items()}
        # Other variables, which only a feature of extra/ has; zeros unless given.
        self.others = {name: x for name, (_, x) in self.variables.items() if name not in params}

    def __call__(self, params: Params) -> GPT:
        zeros = {name: jnp.zeros(x.shape, x.dtype) for name, x in self.others.items()}
        given = [(*self.variables[name], x) for name, x in (zeros | params).items()]
        state = nnx.from_flat_state([(path, variable.replace(x)) for path, variable, x in given])
        return nnx.merge(self.graph, state)


def scan_window(body: Callable, carry: Any, window: Batch) -> tuple[Any, Any]:
    """Scans `body(carry, (micro_step, batch))` over the micro-batches of a window (N, B, T).

    Returns the last carry, and the body's second results stacked, such as losses (N,).
    """
    n = window.tokens.shape[0]
    if n == 1:
        carry, result = body(carry, (0, window.select(0)))
        return carry, jax.tree.map(lambda x: x[None], result)
    return jax.lax.scan(body, carry, (jnp.arange(n), window))
