"""The state of a pure step, and the model as a function of its parameters."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx, traverse_util
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


class Metrics(NamedTuple):
    """The numbers that a step reports to the host."""

    loss: Array
    grad_norm: Array
    updates: Array  # before this one: the position in the learning rate's schedule
    loss_scale: Array
    skipped: Array
    norms: Array  # (P,), by tensor; NaN where a skipped step's gradient is not finite


class PureGPT:
    """The structure of a GPT; called with parameters, it gives the GPT."""

    def __init__(self, make: Callable[[], GPT], param_dtype: str) -> None:
        """Traces `make`, so that no parameter is allocated."""
        self.graph, abstract = nnx.split(nnx.eval_shape(make))
        flat = traverse_util.flatten_dict(nnx.to_pure_dict(abstract))
        self.abstract, self.paths = abstract, {".".join(map(str, path)): path for path in flat}
        kinds = nnx.to_flat_state(abstract)
        parameters = {path for path, variable in kinds if isinstance(variable, nnx.Param)}
        shapes = {name: flat[path] for name, path in self.paths.items()}
        self.shapes = {
            name: jax.ShapeDtypeStruct(x.shape, param_dtype)
            for name, x in shapes.items()
            if self.paths[name] in parameters
        }
        # Variables that are no parameters: features of extra/ have some. Zeros unless given.
        self.others = {name: x for name, x in shapes.items() if name not in self.shapes}

    def __call__(self, params: Params) -> GPT:
        zeros = {name: jnp.zeros(x.shape, x.dtype) for name, x in self.others.items()}
        given = {self.paths[name]: x for name, x in (zeros | params).items()}
        state = jax.tree.map(lambda x: x, self.abstract)  # a copy: replacing is in place
        nnx.replace_by_pure_dict(state, traverse_util.unflatten_dict(given))
        return nnx.merge(self.graph, state)


def jit_method(function: Callable) -> Callable:
    """Jits a method (self, state, batch); callers pass the batch, and self.state is added."""

    def method(self: Any, batch: Any) -> Any:
        name = function.__name__
        if name not in self.compiled:
            self.compiled[name] = self.jit(partial(function, self))
        return self.compiled[name](self.state, batch)

    return wraps(function)(method)


def scan_window(body: Callable, carry: Any, window: Batch) -> tuple[Any, Array]:
    """`body(carry, (micro_step, batch))` for each micro-batch of a window (N, B, T).

    Returns the last carry, and the losses (N,).
    """
    n = window.tokens.shape[0]
    if n == 1:
        carry, loss = body(carry, (0, window.select(0)))
        return carry, loss[None]
    return jax.lax.scan(body, carry, (jnp.arange(n), window))
