"""An NNX module as a pure function of its parameters."""

from collections.abc import Callable

import jax
from flax import nnx, traverse_util

from jax_impl.model import GPT

Params = dict[str, jax.Array]  # flat, so that dispatch costs no walk through a tree in Python


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
