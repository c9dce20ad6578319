"""Weights that several devices share, whole where they are used; FSDP2 does so by itself."""

from typing import Any

import jax
from jax import Array
from jax.sharding import PartitionSpec

constrain = jax.lax.with_sharding_constraint


def divided(x: Any, parts: int) -> PartitionSpec:
    """The longest axis that fsdp divides is divided. Numbers, flags and what no axis divides are on
    every device."""
    fitting = [axis for axis in range(x.ndim) if x.shape[axis] % parts == 0]
    if parts == 1 or not fitting or x.dtype == bool:
        return PartitionSpec()
    longest = max(fitting, key=lambda axis: x.shape[axis])
    return PartitionSpec(*[None] * longest, "fsdp")


def make_whole(weight: Array) -> Array:
    """Where a weight is used, every device has all of it; of its gradient its own part.

    Left to itself, XLA may as well divide the work by columns, and send rows of all devices.
    """
    return _make_whole(weight) if divides_weights() else weight


def make_whole_table(weight: Array) -> Array:
    """The same for one that is looked up: of its gradient each device has all before it is summed,
    lest the rows be sent."""
    weight = make_whole(weight)
    return constrain(weight, PartitionSpec()) if divides_weights() else weight


def divides_rows() -> bool:
    return jax.sharding.get_abstract_mesh().size > 1


def divides_weights() -> bool:
    return jax.sharding.get_abstract_mesh().shape.get("fsdp", 1) > 1


def part_of(x: Array) -> Array:
    return constrain(x, divided(x, jax.sharding.get_abstract_mesh().shape["fsdp"]))


def _forward(weight: Array) -> tuple[Array, None]:
    return constrain(part_of(weight), PartitionSpec()), None  # cast before it is sent


_make_whole = jax.custom_vjp(lambda weight: _forward(weight)[0])
_make_whole.defvjp(_forward, lambda _, grad: (part_of(grad),))
