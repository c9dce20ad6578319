"""Rematerialization by `jax.checkpoint`. What each mode keeps: see `lockstep.model.segments`."""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array

from lockstep.model.segments import segments

Layer = Callable[[Any, Any, Array], Array]  # (block, layer index, x) -> x

# Matmuls without a batch dimension are the weights'; those of attention have one. One with a bias
# is a function with a derivative of its own, into which no policy looks: its result has a name.
AFFINE = "affine"
save_dots = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    jax.checkpoint_policies.save_only_these_names(AFFINE),
)


def remat_sublayer(sublayer: Callable, remat: str) -> Callable:
    """Attention or MLP of one block: under "sublayer" only its input is kept."""
    return jax.checkpoint(sublayer) if remat == "sublayer" else sublayer


def remat_layer(layer: Layer, remat: str) -> Layer:
    """A block: under "block" and "sqrt" only its input is kept, under "dots" its matmuls too."""
    if remat not in ("block", "sqrt", "dots"):
        return layer
    policy = save_dots if remat == "dots" else None

    def run(block: Any, index: Any, x: Array) -> Array:
        # prevent_cse: otherwise XLA merges the recomputation with the first computation. Not for
        # vectors: a matmul's kernel takes in a bias only if it is a parameter.
        matrices = jax.tree.map(lambda a: a.ndim > 1, block)
        held_back = (matrices, False, True)
        return jax.checkpoint(layer, prevent_cse=held_back, policy=policy)(block, index, x)

    return run


def through_blocks(layer: Layer, blocks: list[Any], x: Array, *, remat: str) -> Array:
    """The blocks in order, x (R, D) -> (R, D), under one remat mode."""
    run = remat_layer(layer, remat)

    def span(blocks: list[Any], start: int, x: Array) -> Array:
        for offset, block in enumerate(blocks):
            x = run(block, start + offset, x)
        return x

    if remat != "sqrt":
        return span(blocks, 0, x)
    for layers in segments(len(blocks)):
        x = jax.checkpoint(span)(blocks[layers.start : layers.stop], layers.start, x)
    return x
