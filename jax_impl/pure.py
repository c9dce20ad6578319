"""What a pure step needs: a state to hand on, and the model as a function of its parameters."""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, NamedTuple

import jax
from flax import nnx, traverse_util
from jax import Array

from .model import GPT

Params = dict[str, Array]  # flat, so that dispatch costs no walk through a tree in Python


class State(NamedTuple):
    params: Params
    optimizer: Any
    loss_scale: Array
    good_steps: Array
    step: Array
    frozen: Params  # the parameters that no step changes
    amaxes: Params  # histories of delayed scaling, by linear layer


class Pure:
    """A model without its parameters; called with them, it is the model."""

    def __init__(self, make: Callable[[], GPT], param_dtype: str) -> None:
        """Abstract: no parameter is allocated."""
        self.graph, shapes = nnx.split(nnx.eval_shape(make))
        self.abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, param_dtype), shapes)
        flat = traverse_util.flatten_dict(nnx.to_pure_dict(self.abstract))
        self.paths = {".".join(map(str, path)): path for path in flat}
        self.shapes = {".".join(map(str, path)): leaf for path, leaf in flat.items()}

    def __call__(self, params: Params) -> GPT:
        tree = traverse_util.unflatten_dict({self.paths[name]: a for name, a in params.items()})
        state = jax.tree.map(lambda x: x, self.abstract)  # a copy: replacing is in place
        nnx.replace_by_pure_dict(state, tree)
        return nnx.merge(self.graph, state)


def jit_method(function: Callable) -> Callable:
    """A method of the state and tokens, compiled; it is called with the tokens alone."""

    def method(self: Any, tokens: Array) -> Any:
        name = function.__name__
        if name not in self.compiled:
            self.compiled[name] = self.jit(partial(function, self))
        return self.compiled[name](self.state, tokens)

    return wraps(function)(method)
