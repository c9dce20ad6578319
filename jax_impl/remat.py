"""Rematerialization. What each mode keeps: see `lockstep.model.segments`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from lockstep.model.segments import segments

Layer = Callable[[Any, Any, jax.Array], jax.Array]  # (block, layer index, x) -> x

# Matmuls without a batch dimension are the weights'; those of attention have one. One with a bias
# is a function with a derivative of its own, into which no policy looks: its result has a name.
AFFINE = "affine"
save_dots = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    jax.checkpoint_policies.save_only_these_names(AFFINE),
)

# What a fused torch kernel would not keep either: recomputing it costs no matmul, and XLA is free
# to keep it all the same.
recompute_cheap = partial(jax.checkpoint, prevent_cse=False)


def remat_sublayer(sublayer: Callable, remat: str) -> Callable:
    return jax.checkpoint(sublayer) if remat == "sublayer" else sublayer


def through_blocks(layer: Layer, blocks: Any, x: jax.Array, *, remat: str, scan: bool) -> jax.Array:
    """The blocks in order, x (R, D) -> (R, D), under one remat mode.

    `blocks`: a list of L trees of parameters, or, for `scan`, one tree with a leading axis L.
    """
    recompute = partial(jax.checkpoint, prevent_cse=not scan)
    run = {
        "block": recompute(layer),
        "sqrt": recompute(layer),
        "dots": recompute(layer, policy=save_dots),
    }.get(remat, layer)

    def span(blocks: Any, start: Any, x: jax.Array) -> jax.Array:
        if scan:
            return _scan(run, blocks, start, x)
        for offset, block in enumerate(blocks):
            x = run(block, start + offset, x)
        return x

    if remat != "sqrt":
        return span(blocks, 0, x)
    segment = recompute(span)
    if scan:
        return _scan_segments(segment, blocks, x)
    for layers in segments(len(blocks)):
        x = segment(blocks[layers.start : layers.stop], layers.start, x)
    return x


def _scan(layer: Layer, stacked: Any, start: Any, x: jax.Array) -> jax.Array:
    def body(x: jax.Array, block: tuple[Any, jax.Array]) -> tuple[jax.Array, None]:
        params, index = block
        return layer(params, index, x), None

    return jax.lax.scan(body, x, (stacked, start + jax.numpy.arange(_length(stacked))))[0]


def _scan_segments(segment: Layer, stacked: Any, x: jax.Array) -> jax.Array:
    """One scan over the segments of one size: XLA sees a loop, and frees what a turn used."""
    spans = segments(_length(stacked))
    size = len(spans[0])
    n = sum(len(layers) == size for layers in spans)
    even = jax.tree.map(lambda a: a[: n * size].reshape(n, size, *a.shape[1:]), stacked)
    x = _scan(lambda params, i, x: segment(params, i * size, x), even, 0, x)
    for layers in spans[n:]:
        x = segment(jax.tree.map(lambda a: a[layers.start : layers.stop], stacked), layers.start, x)  # noqa: B023
    return x


def _length(stacked: Any) -> int:
    return jax.tree.leaves(stacked)[0].shape[0]
