"""The devices of a run on a mesh of data x fsdp, and what lies where on them.

The step is one program over the whole batch; XLA divides it by where its inputs lie. So neither
the model nor the step says anything of devices.
"""

from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lockstep.config import Config
from lockstep.errors import require

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


def place_rows(tokens: np.ndarray, mesh: Mesh) -> Array:
    """(..., B, T or T+1): each device has its rows, and each process makes those of its devices.

    Rows that cannot be divided, such as a sample's, are on every device.
    """
    divided = tokens.shape[-2] % mesh.size == 0
    spec = PartitionSpec(*[None] * (tokens.ndim - 2), AXES) if divided else PartitionSpec()
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(tokens.shape, sharding, lambda index: tokens[index])


def everywhere(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def whole(tensors: Any) -> Any:
    """Of all processes' parts; every process calls it."""

    def gather(x: Any) -> Any:
        here = not isinstance(x, Array) or x.is_fully_addressable or x.is_fully_replicated
        return x if here else jax.device_put(x, NamedSharding(x.sharding.mesh, PartitionSpec()))

    return jax.tree.map(gather, tensors)


def shardings(state: Any, mesh: Mesh) -> Any:
    """Of each array by its shape: the longest axis that fsdp divides is divided.

    Numbers, flags and what no axis divides are on every device.
    """

    def place(x: Any) -> NamedSharding:
        parts = mesh.shape["fsdp"]
        fitting = [axis for axis in range(x.ndim) if x.shape[axis] % parts == 0]
        if parts == 1 or not fitting or x.dtype == bool:
            return everywhere(mesh)
        longest = max(fitting, key=lambda axis: x.shape[axis])
        return NamedSharding(mesh, PartitionSpec(*[None] * longest, "fsdp"))

    return jax.tree.map(place, state)
