"""Stacked layers: one tree of parameters with a leading axis L, and a loop that XLA sees."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from lockstep.model.segments import segments
from lockstep.model.stacked import is_stacked

Layer = Callable[[Any, Any, Array], Array]  # (block, layer index, x) -> x


def scan_layers(layer: Layer, stacked: Any, start: Any, x: Array) -> Array:
    def body(x: Array, block: tuple[Any, Array]) -> tuple[Array, None]:
        params, index = block
        return layer(params, index, x), None

    return jax.lax.scan(body, x, (stacked, start + jnp.arange(_length(stacked))))[0]


def scan_segments(segment: Layer, stacked: Any, x: Array) -> Array:
    """One scan over the segments of one size: XLA frees what a turn used; then the longer ones."""
    spans = segments(_length(stacked))
    size = len(spans[0])
    n = sum(len(layers) == size for layers in spans)
    even = jax.tree.map(lambda a: a[: n * size].reshape(n, size, *a.shape[1:]), stacked)
    x = scan_layers(lambda params, i, x: segment(params, i * size, x), even, 0, x)
    for layers in spans[n:]:
        some = slice(layers.start, layers.stop)
        x = segment(jax.tree.map(lambda a: a[some], stacked), layers.start, x)  # noqa: B023
    return x


def by_tensor(measure: Callable[[Array], Array], tensors: dict[str, Any]) -> Array:
    """(P,): one number for each of `stacked.tensor_names`."""
    return jnp.concatenate(
        [
            jax.vmap(measure)(x) if is_stacked(name) else measure(x)[None]
            for name, x in sorted(tensors.items())
        ]
    )


def _length(stacked: Any) -> int:
    return jax.tree.leaves(stacked)[0].shape[0]
