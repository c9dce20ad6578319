"""Rematerialization. What each mode keeps: see `lockstep.model.segments`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from lockstep.model.segments import segments

Params = Any  # one block's parameters, a tree of arrays
Layer = Callable[[Params, Any, jax.Array], jax.Array]  # (params, layer index, x) -> x

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


def through_blocks(
    layer: Layer, blocks: Any, x: jax.Array, n_layer: int, *, remat: str, scan: bool
) -> jax.Array:
    """The blocks in order, x (R, D) -> (R, D), under one remat mode.

    Args:
        blocks: a list of L parameter trees, or, for `scan`, one tree with a leading axis L.
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
        for offset, params in enumerate(blocks):
            x = run(params, start + offset, x)
        return x

    if remat != "sqrt":
        return span(blocks, 0, x)
    segment, spans = recompute(span), segments(n_layer)
    if scan:  # one scan over the segments of one size: XLA sees a loop, and frees what a turn used
        size = len(spans[0])
        n = sum(len(layers) == size for layers in spans)
        even = jax.tree.map(lambda a: a[: n * size].reshape(n, size, *a.shape[1:]), blocks)
        x = _scan(lambda params, i, x: segment(params, i * size, x), even, 0, x)
        spans = spans[n:]
    for layers in spans:
        some = slice(layers.start, layers.stop)
        taken = jax.tree.map(lambda a: a[some], blocks) if scan else blocks[some]  # noqa: B023
        x = segment(taken, layers.start, x)
    return x


def _scan(layer: Layer, stacked: Params, start: Any, x: jax.Array) -> jax.Array:
    length = jax.tree.leaves(stacked)[0].shape[0]

    def body(x: jax.Array, block: tuple[Params, jax.Array]) -> tuple[jax.Array, None]:
        params, index = block
        return layer(params, index, x), None

    return jax.lax.scan(body, x, (stacked, start + jax.numpy.arange(length)))[0]
