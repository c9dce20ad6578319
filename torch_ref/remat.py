"""Rematerialization by `torch.utils.checkpoint`: what is recomputed instead of kept.

none      keep everything
sublayer  keep each sublayer's input (attention and MLP)
block     keep each block's input
sqrt      keep each segment's input, and while a segment is recomputed each of its blocks' inputs
dots      keep the outputs of the weight matmuls, recompute the rest of each block
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from lockstep.model.segments import segments

Layer = Callable[[Any, int, Tensor], Tensor]  # (block, layer index, x) -> x

# Weight matmuls have no batch dimension; those of attention are bmm. A library that
# multiplies weights by an operator of its own adds it: `extra/onednn.py`.
WEIGHT_MATMULS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}


def _save(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keep = op in WEIGHT_MATMULS
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


save_dots = partial(create_selective_checkpoint_contexts, _save)


def recompute(function: Callable, **how: Any) -> Callable:
    """Keeps only the function's inputs for the backward pass, as `jax.checkpoint` does."""
    return partial(checkpoint, function, use_reentrant=False, **how)


def remat_sublayer(sublayer: Callable, remat: str) -> Callable:
    """Attention or MLP of one block: under "sublayer" only its input is kept."""
    return recompute(sublayer) if remat == "sublayer" else sublayer


def remat_layer(layer: Layer, remat: str) -> Layer:
    """A block: "block" and "sqrt" keep its input, "dots" also the outputs of its weight matmuls."""
    if remat not in ("block", "sqrt", "dots"):
        return layer
    return recompute(layer, context_fn=save_dots) if remat == "dots" else recompute(layer)


def through_blocks(layer: Layer, blocks: list[Any], x: Tensor, *, remat: str) -> Tensor:
    """The blocks in order, x (R, D) -> (R, D), under one remat mode."""
    run = remat_layer(layer, remat)

    def span(blocks: list[Any], start: int, x: Tensor) -> Tensor:
        for offset, block in enumerate(blocks):
            x = run(block, start + offset, x)
        return x

    if remat != "sqrt":
        return span(blocks, 0, x)
    for layers in segments(len(blocks)):  # `run` checkpoints each block inside its segment
        x = recompute(span)(blocks[layers.start : layers.stop], layers.start, x)
    return x
