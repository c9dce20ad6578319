"""Weights sharded over devices (fsdp), gathered where they are used, as FSDP2 does."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from ...functional import Product
from ...model import Embedding, Linear

constrain = jax.lax.with_sharding_constraint


def divided(x: Any, parts: int) -> PartitionSpec:
    """The longest axis that fsdp divides is divided. Numbers, flags and what no axis divides are on
    every device."""
    fitting = [axis for axis in range(x.ndim) if x.shape[axis] % parts == 0]
    if parts == 1 or not fitting or x.dtype == bool:
        return PartitionSpec()
    longest = max(fitting, key=lambda axis: x.shape[axis])
    return PartitionSpec(*[None] * longest, "fsdp")


class SharedEmbedding(Embedding):
    """An embedding of which each device has a part."""

    def __call__(self, tokens_BT: Array) -> Array:
        # Otherwise XLA sends the rows between devices, which are larger than the gradient.
        return constrain(make_whole(self.weight[...]), PartitionSpec())[tokens_BT]

    def transposed(self) -> Array:
        return make_whole(self.weight[...]).T


class RegatheringLinear(Linear):
    """A linear layer that gathers its weight again in the backward pass, instead of keeping it."""

    def multiply(self, x_RD: Array, weight: Array, bias: Array | None = None) -> Array:
        run = jax.checkpoint(super().multiply, policy=keep_divided)
        return run(x_RD, weight, bias)


def keep_divided(primitive: Any, *_: Any, **how: Any) -> bool:
    """A policy of `jax.checkpoint` that keeps everything but whole weights."""
    return primitive.name != "sharding_constraint"


def gathered(product: Product) -> Product:
    """The product of weights that several devices share."""

    def run(x: Array, weight: Array, bias: Array | None) -> Array:
        return product(x, make_whole(weight), None if bias is None else make_whole(bias))

    return run


def sum_widely(multiply: Any = jnp.matmul) -> Any:
    """A product whose sum over rows stays in float32: XLA adds up the devices' behind it, and what
    is rounded there would be sent so, too."""

    def run(a: Array, b: Array) -> Array:
        wide = jnp.promote_types(a.dtype, jnp.float32)
        return multiply(a, b, preferred_element_type=wide)

    return run


@jax.custom_vjp
def make_whole(weight: Array) -> Array:
    """Gives every device all of a weight where it is used, and of the gradient its own part.

    Left to itself, XLA may as well divide the work by columns, and send rows of all devices.
    """
    return _forward(weight)[0]


def part_of(x: Array) -> Array:
    return constrain(x, divided(x, jax.sharding.get_abstract_mesh().shape["fsdp"]))


def _forward(weight: Array) -> tuple[Array, None]:
    return constrain(part_of(weight), PartitionSpec()), None  # cast before it is sent


make_whole.defvjp(_forward, lambda _, grad: (part_of(grad),))
