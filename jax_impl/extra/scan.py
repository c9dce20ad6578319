"""Stacked layers: one tree of parameters with a leading axis L, and a loop that XLA sees."""

from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from lockstep.model.segments import segments

from .. import remat
from ..model import GPT, Block, Layers
from ..remat import Layer


class ScannedGPT(GPT):
    """A GPT whose blocks are one block with stacked parameters, run by `jax.lax.scan`."""

    def make_blocks(self, layers: Layers) -> Any:
        def make(rngs: nnx.Rngs) -> Block:
            drawing = copy(layers)
            drawing.rngs = rngs
            # The first block stands for all, which have the same formats.
            return Block(self.config, drawing, "blocks.0", remat=self.remat)

        return nnx.vmap(make)(layers.rngs.split(self.config.n_layer))

    def run_blocks(self, layer: Callable, x_RD: Array) -> Array:
        return scan_blocks(layer, nnx.split(self.blocks), x_RD, remat=self.remat)


def scan_blocks(layer: Layer, blocks: Any, x: Array, *, remat: str) -> Array:
    """The stacked blocks in order, x (R, D) -> (R, D), under one remat mode."""
    run = remat_scanned(layer, remat)
    if remat != "sqrt":
        return scan_layers(run, blocks, 0, x)
    segment = jax.checkpoint(partial(scan_layers, run), prevent_cse=False)
    return scan_segments(segment, blocks, x)


def remat_scanned(layer: Layer, mode: str) -> Layer:
    """Recomputes a scanned layer; a scan needs no barrier (prevent_cse) between two of them."""
    if mode not in ("block", "sqrt", "dots"):
        return layer
    policy = remat.save_dots if mode == "dots" else None
    return jax.checkpoint(layer, prevent_cse=False, policy=policy)


def scan_layers(layer: Layer, stacked: Any, start: Any, x: Array) -> Array:
    """Scans the layers of a stacked block; the first has the index `start`."""

    def body(x: Array, block: tuple[Any, Array]) -> tuple[Array, None]:
        params, index = block
        return layer(params, index, x), None

    return jax.lax.scan(body, x, (stacked, start + jnp.arange(_length(stacked))))[0]


def scan_segments(segment: Layer, stacked: Any, x: Array) -> Array:
    """Scans the segments of one size, whose buffers XLA frees each time; then the longer ones."""
    spans = segments(_length(stacked))
    size = len(spans[0])
    n = sum(len(layers) == size for layers in spans)
    even = jax.tree.map(lambda a: a[: n * size].reshape(n, size, *a.shape[1:]), stacked)
    x = scan_layers(lambda params, i, x: segment(params, i * size, x), even, 0, x)
    for layers in spans[n:]:
        some = slice(layers.start, layers.stop)
        x = segment(jax.tree.map(lambda a: a[some], stacked), layers.start, x)  # noqa: B023
    return x


def _length(stacked: Any) -> int:
    return jax.tree.leaves(stacked)[0].shape[0]
