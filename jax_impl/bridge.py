"""Between the trainer's state and the canonical one. JAX kernels are in x out: transposed.

With scanned layers the blocks' parameters are stacked, with a leading axis L.
"""

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_impl.optim import STACKED
from jax_impl.step import Params, State, Trainer, update_count
from lockstep.config import ModelConfig
from lockstep.model.params import Arrays, shapes
from lockstep.model.state import TrainState

EMBEDDINGS = ("embed.weight", "position.weight")


class Place(NamedTuple):
    """Where a canonical parameter lives in the flat dict of the JAX model."""

    key: str
    layer: int | None  # index on the leading axis of a stacked parameter
    transposed: bool


def places(config: ModelConfig, scan: bool) -> dict[str, Place]:
    return {name: _place(name, len(shape), scan) for name, shape in shapes(config).items()}


def _place(name: str, ndim: int, scan: bool) -> Place:
    kernel = ndim == 2 and name not in EMBEDDINGS
    if name in EMBEDDINGS:
        key = name.removesuffix(".weight")
    else:
        key = re.sub(r"weight$", "kernel" if kernel else "scale", name)
    stacked = re.match(r"blocks\.(\d+)\.", name) if scan else None
    if not stacked:
        return Place(key, None, kernel)
    return Place(re.sub(r"^blocks\.\d+", "blocks", key), int(stacked[1]), kernel)


def to_canonical(params: Params, config: ModelConfig) -> Arrays:
    host, scan = jax.device_get(params), any(map(STACKED.match, params))

    def take(place: Place) -> np.ndarray:
        array = host[place.key] if place.layer is None else host[place.key][place.layer]
        return np.array(array.T if place.transposed else array, order="C")

    return {name: take(place) for name, place in places(config, scan).items()}


def from_canonical(arrays: Arrays, config: ModelConfig, scan: bool, dtype: str) -> Params:
    layers: dict[str, list[np.ndarray]] = {}
    for name, place in places(config, scan).items():
        array = arrays[name].T if place.transposed else arrays[name]
        layers.setdefault(place.key, []).append(array)
    stacked = places(config, scan).values()
    whole = {place.key for place in stacked if place.layer is None}
    # A copy: the step donates its state, and must not give away numpy's memory.
    return {
        key: jnp.array(parts[0] if key in whole else np.stack(parts), dtype, copy=True)
        for key, parts in layers.items()
    }


def load(trainer: Trainer, state: TrainState) -> None:
    """Replaces everything that a step changes. Arrays are cast to the param dtype."""
    config, dtype = trainer.config.model, trainer.dtypes.param
    params, mu, nu = (
        from_canonical(arrays, config, trainer.model.scan, dtype)
        for arrays in (state.params, state.mu, state.nu)
    )
    fresh = trainer.optimizer.init(params)
    moved = optax.tree.set(fresh, mu=mu, nu=nu, count=jnp.int32(state.updates))
    scalars = jnp.float32(state.loss_scale), jnp.int32(state.good_steps), jnp.int32(state.step)
    whole = State(params, moved, *scalars)
    # Adam's and the schedule's count are one buffer here, and a buffer can be donated only once.
    whole = jax.tree.map(lambda a: a if a.ndim else jnp.copy(a), whole)
    trainer.state = jax.device_put(whole, trainer.device)


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
