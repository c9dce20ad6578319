"""Between the trainer's state and the canonical one. JAX's matrices are in x out: transposed.

With scanned layers the blocks' parameters are stacked, with a leading axis L.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh

from lockstep.config import ModelConfig
from lockstep.model.params import Arrays, shapes
from lockstep.model.stacked import in_first_layer, is_stacked, layer_names, unstack
from lockstep.model.state import TrainState, histories

from ..extra.mesh.mesh import shardings, whole
from ..optim import update_count
from ..step import Params, State, Trainer

EMBEDDINGS = ("embed.weight", "position.weight")


def to_numpy(array: Array | np.ndarray) -> np.ndarray:
    """A copy on the host, bit for bit."""
    return np.array(whole(array), order="C")


def turn(name: str, array: Any) -> Any:
    """From one layout to the other: transposes the matrices, which embeddings are none of."""
    return array.T if array.ndim == 2 and name not in EMBEDDINGS else array


def turn_index(name: str, index: tuple[slice, ...]) -> tuple[slice, ...]:
    return index[::-1] if len(index) == 2 and name not in EMBEDDINGS else index


def to_canonical(tensors: Params, config: ModelConfig) -> Arrays:
    # One tensor at a time: a device of several may have no room for all of the weights.
    host = unstack({name: jax.device_get(whole(x)) for name, x in tensors.items()})
    return {name: to_numpy(turn(name, host[name])) for name in shapes(config) if name in host}


def from_canonical(
    arrays: Arrays, shapes: Mapping[str, Any], mesh: Mesh | None = None
) -> dict[str, Any]:
    """Places the arrays that the trainer's shapes name: on the mesh, or without one on the host."""
    found = {name: like for name, like in shapes.items() if in_first_layer(name) in arrays}
    return {
        name: _place(like, mesh, partial(_part, arrays, name, like)) for name, like in found.items()
    }


def _part(arrays: Arrays, name: str, like: Any, index: Any) -> np.ndarray:
    if is_stacked(name):
        layers, index = layer_names(name, like)[index[0]], index[1:]
        found = np.stack([turn(each, arrays[each][turn_index(each, index)]) for each in layers])
    else:
        found = turn(name, np.asarray(arrays[name][turn_index(name, index)]))
    return found.astype(like.dtype, copy=False)


def _place(like: Any, mesh: Mesh | None, part: Callable[[Any], np.ndarray]) -> Array | np.ndarray:
    """Each process reads the parts of its own devices, and no others. No program is compiled, as
    one is for each shape that `jnp.array` or `jnp.zeros` meets. JAX may go on with numpy's memory,
    and does not reuse it for results, though the state is donated."""
    if mesh is None:
        return part((slice(None),) * like.ndim)
    return jax.make_array_from_callback(like.shape, shardings(like, mesh), part)


def load(trainer: Trainer, state: TrainState) -> None:
    """Replaces everything that a step changes. Arrays are cast to the param dtype."""
    mesh = trainer.mesh
    params, mu, nu = (
        from_canonical(arrays, trainer.model.shapes, mesh)
        for arrays in (state.params, state.mu, state.nu)
    )

    def zeros(like: Any) -> Any:
        """Returns zeros for a shape that has no array yet."""
        if not isinstance(like, jax.ShapeDtypeStruct):
            return like
        return _place(like, mesh, lambda at: np.zeros(like.shape, like.dtype)[at])

    trained = {name: params[name] for name in trainer.trained}
    fresh = jax.eval_shape(trainer.optimizer.init, trained)
    moved = optax.tree.set(fresh, mu=mu, nu=nu, count=np.int32(state.updates))
    scalars: tuple[Any, Any, Any] = (
        np.float32(state.loss_scale), np.int32(state.good_steps), np.int32(state.step),
    )  # fmt: skip
    amaxes: Any = histories(trainer.config, state.amaxes) if trainer.delayed else {}
    known = State(params, jax.tree.map(zeros, moved), *scalars, amaxes)
    trainer.state = jax.device_put(known, shardings(known, mesh) if mesh else trainer.device)


def save(trainer: Trainer) -> TrainState:
    """The canonical state, copied to the host; every process calls it."""
    state = trainer.state
    # In the order of the forward pass; jit has sorted them by name.
    amaxes = {n: to_numpy(state.amaxes[n]) for n in trainer.config.dtypes.histories}
    params, mu, nu = (
        to_canonical(tensors, trainer.config.model)
        for tensors in (
            state.params,
            optax.tree.get(state.optimizer, "mu"),
            optax.tree.get(state.optimizer, "nu"),
        )
    )
    return TrainState(
        params=params,
        mu=mu,
        nu=nu,
        step=int(state.step),
        updates=int(update_count(state.optimizer)),
        loss_scale=float(state.loss_scale),
        good_steps=int(state.good_steps),
        amaxes=amaxes,
    )
