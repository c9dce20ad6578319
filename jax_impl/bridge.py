"""Between the trainer's state and the canonical one. JAX's matrices are in x out: transposed.

With scanned layers the blocks' parameters are stacked, with a leading axis L.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from lockstep.config import ModelConfig
from lockstep.model.params import Arrays, shapes
from lockstep.model.stacked import is_stacked, stack, unstack
from lockstep.model.state import TrainState

from .mesh import whole
from .pure import Params, State
from .step import Trainer, update_count

EMBEDDINGS = ("embed.weight", "position.weight")


def to_numpy(array: Array | np.ndarray) -> np.ndarray:
    """A copy on the host, bit for bit."""
    return np.array(whole(array), order="C")


def turn(name: str, array: np.ndarray) -> np.ndarray:
    """From one layout to the other: transposes the matrices, which embeddings are none of."""
    return array.T if array.ndim == 2 and name not in EMBEDDINGS else array


def to_canonical(tensors: Params, config: ModelConfig) -> Arrays:
    host = unstack(jax.device_get(whole(tensors)))
    return {name: to_numpy(turn(name, host[name])) for name in shapes(config)}


def from_canonical(arrays: Arrays, config: ModelConfig, scan: bool, dtype: str) -> Params:
    turned = {name: turn(name, arrays[name]) for name in shapes(config)}
    # A copy: the step donates its state, and must not give away numpy's memory.
    return {
        name: jnp.array(array, dtype, copy=True)
        for name, array in (stack(turned) if scan else turned).items()
    }


def load(trainer: Trainer, state: TrainState) -> None:
    """Replaces everything that a step changes. Arrays are cast to the param dtype."""
    config, dtype = trainer.config.model, trainer.dtypes.param
    scan = any(map(is_stacked, trainer.model.shapes))
    params, mu, nu = (
        from_canonical(arrays, config, scan, dtype) for arrays in (state.params, state.mu, state.nu)
    )
    fresh = trainer.optimizer.init(params)
    moved = optax.tree.set(fresh, mu=mu, nu=nu, count=jnp.int32(state.updates))
    scalars = jnp.float32(state.loss_scale), jnp.int32(state.good_steps), jnp.int32(state.step)
    whole = State(params, moved, *scalars)
    # Adam's and the schedule's count are one buffer here, and a buffer can be donated only once.
    whole = jax.tree.map(lambda a: a if a.ndim else jnp.copy(a), whole)
    trainer.state = trainer.place_state(whole)


def save(trainer: Trainer) -> TrainState:
    """The canonical state, copied to the host."""
    state = trainer.state
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
    )
