"""The devices of a run on a mesh of data x fsdp, and what lies where on them.

The step is one program over the whole batch; XLA divides it by where its inputs lie. So neither
the model nor the step of the core says anything of devices.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lockstep.config import Config
from lockstep.data.batch import Batch
from lockstep.errors import require

from ...step import Metrics, State
from .gather import divided
from .processes import process_count

AXES = ("data", "fsdp")


def make_mesh(config: Config, device: jax.Device) -> Mesh | None:
    """None for one device. Every process of the run calls it.

    Raises:
        UserError: there are fewer devices of this kind; or more, some of another process.
    """
    processes = process_count()
    if config.mesh.size == processes == 1:  # whose device may not be here
        return None
    devices = jax.devices(device.platform)
    remedy = f"JAX sees {len(devices)} devices in {processes} processes; use as many"
    fits = config.mesh.size == len(devices) if processes > 1 else config.mesh.size <= len(devices)
    require(fits, "--mesh", config.mesh, remedy)
    devices, auto = devices[: config.mesh.size], (AxisType.Auto,) * 2
    return jax.make_mesh(config.mesh, AXES, auto, devices=devices)


def shard(
    step: Callable[[State, Batch], tuple[State, Metrics]], mesh: Mesh
) -> Callable[[State, Batch], tuple[State, Metrics]]:
    """Lets a step leave the state divided as it came, so that it can be donated."""

    @wraps(step)  # whose name `lockstep compile` looks for in what XLA writes
    def sharded_step(state: State, window: Batch) -> tuple[State, Metrics]:
        after, metrics = step(state, window)
        after = jax.lax.with_sharding_constraint(after, shardings(after, mesh))
        everywhere = NamedSharding(mesh, PartitionSpec())
        norms = jax.lax.with_sharding_constraint(metrics.norms, everywhere)
        return after, metrics._replace(norms=norms)

    return sharded_step


def place_batch(batch: Batch, device: jax.Device, mesh: Mesh | None) -> Batch:
    """Starts the copy of a batch's arrays to the device, or to all devices of the mesh."""
    return jax.device_put(batch, device) if mesh is None else place_rows(batch, mesh)


def place_rows(batch: Batch, mesh: Mesh) -> Batch:
    """Arrays (..., B, T): each device has its rows, and each process makes those of its devices.

    Rows that cannot be divided, such as a sample's, are on every device.
    """

    def place(rows: np.ndarray) -> Array:
        sharding = NamedSharding(mesh, divided_rows(rows.shape, mesh))
        return jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index])

    return batch.map_arrays(place)


def local_rows(count: int, mesh: Mesh | None) -> np.ndarray | None:
    """Returns the rows of a batch that this process's devices take; None: all."""
    if mesh is None or count % mesh.size:
        return None
    parts = np.split(np.arange(count), mesh.size)
    here = (device.process_index == jax.process_index() for device in mesh.devices.flat)
    return np.concatenate([part for part, own in zip(parts, here) if own])


def divided_rows(shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    divides = shape[-2] % mesh.size == 0
    return PartitionSpec(*[None] * (len(shape) - 2), AXES) if divides else PartitionSpec()


def whole(tensors: Any) -> Any:
    """Gathers tensors from all processes' parts; every process calls it."""

    def gather(x: Any) -> Any:
        here = not isinstance(x, Array) or x.is_fully_addressable or x.is_fully_replicated
        return x if here else jax.device_put(x, NamedSharding(x.sharding.mesh, PartitionSpec()))

    return jax.tree.map(gather, tensors)


def shardings(state: Any, mesh: Mesh) -> Any:
    """Returns the sharding of each array, by its shape, as `divided` says."""
    parts = mesh.shape["fsdp"]
    return jax.tree.map(lambda x: NamedSharding(mesh, divided(x, parts)), state)


def in_mesh(jit: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """A `jit` in whose functions `make_whole` knows the mesh."""

    def jit_in_mesh(function: Callable[..., Any], **how: Any) -> Any:
        @wraps(function)
        def within(*args: Any) -> Any:
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                return function(*args)

        return jit(within, **how)

    return jit_in_mesh
