"""Rematerialization. What each mode keeps: see `lockstep.model.segments`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import Array

from lockstep.model.segments import segments

from .extra.scan import Layer, scan_layers, scan_segments

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
# What must not be kept: a barrier stands between the two, lest XLA take them for one.
recompute = jax.checkpoint


def keep_divided(primitive: Any, *_: Any, **how: Any) -> bool:
    """Everything but whole weights."""
    return primitive.name != "sharding_constraint"


def remat_sublayer(sublayer: Callable, remat: str) -> Callable:
    return recompute(sublayer) if remat == "sublayer" else sublayer


def through_blocks(layer: Layer, blocks: Any, x: Array, *, remat: str, scan: bool) -> Array:
    """The blocks in order, x (R, D) -> (R, D), under one remat mode."""
    # Blocks are L trees of parameters, or, for `scan`, one tree with a leading axis L.
    again = partial(recompute, prevent_cse=not scan)

    def recomputed(block: Any, index: Any, x: Array) -> Array:
        # No barrier before a vector: a matmul's kernel takes in a bias that is a parameter alone.
        matrices = jax.tree.map(lambda a: not scan and a.ndim > 1, block)
        held_back = (matrices, False, not scan)
        policy = save_dots if remat == "dots" else None
        return recompute(layer, prevent_cse=held_back, policy=policy)(block, index, x)

    run = recomputed if remat in ("block", "sqrt", "dots") else layer

    def span(blocks: Any, start: Any, x: Array) -> Array:
        if scan:
            return scan_layers(run, blocks, start, x)
        for offset, block in enumerate(blocks):
            x = run(block, start + offset, x)
        return x

    if remat != "sqrt":
        return span(blocks, 0, x)
    segment = again(span)
    if scan:
        return scan_segments(segment, blocks, x)
    for layers in segments(len(blocks)):
        x = segment(blocks[layers.start : layers.stop], layers.start, x)
    return x
