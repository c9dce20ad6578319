"""Activation checkpointing (remat) by `jax.checkpoint`: the backward pass recomputes the rest.

none      save everything
sublayer  save each sublayer's input (attention and MLP)
block     save each block's input
sqrt      save each segment's input; while a segment is recomputed, save its blocks' inputs
dots      save the outputs of the weight matmuls, recompute the rest of each block
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array

from lockstep.model.segments import segments

Layer = Callable[[Any, Any, Array], Array]  # (block, layer index, x) -> x

# Weight matmuls have no batch dimension, attention's have one. A matmul with a bias is a custom_vjp
# (functional.affine), into which no policy looks: its output has this name, and is saved by it.
AFFINE = "affine"
save_dots = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    jax.checkpoint_policies.save_only_these_names(AFFINE),
)


def remat_sublayer(sublayer: Callable, remat: str) -> Callable:
    """Wraps attention or MLP of one block: "sublayer" saves only its input."""
    return jax.checkpoint(sublayer) if remat == "sublayer" else sublayer


def remat_layer(layer: Layer, remat: str) -> Layer:
    """Wraps a block: "block" and "sqrt" save its input, "dots" also its weight matmuls' outputs."""
    if remat not in ("block", "sqrt", "dots"):
        return layer
    policy = save_dots if remat == "dots" else None

    def run(block: Any, index: Any, x: Array) -> Array:
        # prevent_cse puts barriers on matrices and x: otherwise XLA merges the recomputation with
        # the first pass. Biases have none: XLA fuses a bias only if it is a parameter.
        prevent_cse = (jax.tree.map(lambda a: a.ndim > 1, block), False, True)
        return jax.checkpoint(layer, prevent_cse=prevent_cse, policy=policy)(block, index, x)

    return run


def through_blocks(layer: Layer, blocks: list[Any], x: Array, *, remat: str) -> Array:
    """Runs the blocks in order, x (R, D) -> (R, D), under one remat mode."""
    run = remat_layer(layer, remat)

    def span(blocks: list[Any], start: int, x: Array) -> Array:
        for offset, block in enumerate(blocks):
            x = run(block, start + offset, x)
        return x

    if remat != "sqrt":
        return span(blocks, 0, x)
    for layers in segments(len(blocks)):  # `run` checkpoints each block inside its segment
        x = jax.checkpoint(span)(blocks[layers.start : layers.stop], layers.start, x)
    return x
