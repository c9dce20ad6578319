"""Activation checkpointing (remat) by `torch.utils.checkpoint`: backward recomputes the rest.

none      save everything
sublayer  save each sublayer's input (attention and MLP)
block     save each block's input
sqrt      save each segment's input; while a segment is recomputed, save its blocks' inputs
dots      save the outputs of the weight matmuls, recompute the rest of each block
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from lockstep.model.segments import segments

Layer = Callable[[Any, int, Tensor], Tensor]  # (block, layer index, x) -> x

# Weight matmuls have no batch dimension; those of attention are bmm. The last three are the
# operators of `extra/cpu.py`.
WEIGHT_MATMULS = {
    "aten::mm",
    "aten::addmm",
    "mkldnn::_linear_pointwise",
    "lockstep::linear",
    "lockstep::widened_linear",
}


def _save(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keep = op.name() in WEIGHT_MATMULS
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


save_dots = partial(create_selective_checkpoint_contexts, _save)


def recompute(function: Callable, **how: Any) -> Callable:
    """Saves only the function's inputs for the backward pass, as `jax.checkpoint` does."""
    return partial(checkpoint, function, use_reentrant=False, **how)


def remat_sublayer(sublayer: Callable, remat: str) -> Callable:
    """Wraps attention or MLP of one block: "sublayer" saves only its input."""
    return recompute(sublayer) if remat == "sublayer" else sublayer


def remat_layer(layer: Layer, remat: str) -> Layer:
    """Wraps a block: "block" and "sqrt" save its input, "dots" also its weight matmuls' outputs."""
    if remat not in ("block", "sqrt", "dots"):
        return layer
    return recompute(layer, context_fn=save_dots) if remat == "dots" else recompute(layer)


def through_blocks(layer: Layer, blocks: list[Any], x: Tensor, *, remat: str) -> Tensor:
    """Runs the blocks in order, x (R, D) -> (R, D), under one remat mode."""
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
