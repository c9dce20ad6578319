"""Rematerialization by `jax.checkpoint`: what the backward pass recomputes instead of keeping.

none      keep everything
sublayer  keep each sublayer's input (attention and MLP)
block     keep each block's input
sqrt      keep each segment's input, and while a segment is recomputed each of its blocks' inputs
dots      keep the outputs of the weight matmuls, recompute the rest of each block
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array

from lockstep.model.segments import segments

Layer = Callable[[Any, Any, Array], Array]  # (block, layer index, x) -> x

# Weight matmuls have no batch dimension, attention's have one. A matmul with a bias is a custom_vjp
# (functional.affine), into which no policy looks: its output has this name instead.
AFFINE = "affine"
save_dots = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    jax.checkpoint_policies.save_only_these_names(AFFINE),
)


def remat_sublayer(sublayer: Callable, remat: str) -> Callable:
    """Attention or MLP of one block: under "sublayer" only its input is kept."""
    return jax.checkpoint(sublayer) if remat == "sublayer" else sublayer


def remat_layer(layer: Layer, remat: str) -> Layer:
    """A block: "block" and "sqrt" keep its input, "dots" also the outputs of its weight matmuls."""
    if remat not in ("block", "sqrt", "dots"):
        return layer
    policy = save_dots if remat == "dots" else None

    def run(block: Any, index: Any, x: Array) -> Array:
        # By argument: a barrier on matrices and x keeps XLA from merging the recomputation with the
        # first pass. None on biases: XLA fuses a bias only if it is a parameter.
        prevent_cse = (jax.tree.map(lambda a: a.ndim > 1, block), False, True)
        return jax.checkpoint(layer, prevent_cse=prevent_cse, policy=policy)(block, index, x)

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
    for layers in segments(len(blocks)):  # `run` checkpoints each block inside its segment
        x = jax.checkpoint(span)(blocks[layers.start : layers.stop], layers.start, x)
    return x
