"""Rematerialization. What each mode keeps: see `lockstep.model.segments`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from lockstep.model.segments import segments

from .extra import onednn

Layer = Callable[[Any, int, Tensor], Tensor]  # (block, layer index, x) -> x

# Matmuls without a batch dimension are the weights'; those of attention are bmm.
WEIGHT_MATMULS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
if onednn.LINEAR:
    WEIGHT_MATMULS |= {onednn.LINEAR.default, torch.ops.lockstep.linear.default}


def _save(context, op, *args, **kwargs) -> CheckpointPolicy:  # type: ignore[no-untyped-def]
    keep = op in WEIGHT_MATMULS
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


save_dots = partial(create_selective_checkpoint_contexts, _save)


def recompute(function: Callable, **how: Any) -> Callable:
    """What `jax.checkpoint` is."""
    return partial(checkpoint, function, use_reentrant=False, **how)


def remat_sublayer(sublayer: Callable, remat: str) -> Callable:
    return recompute(sublayer) if remat == "sublayer" else sublayer


def through_blocks(layer: Layer, blocks: list[nn.Module], x: Tensor, *, remat: str) -> Tensor:
    """The blocks in order, x (R, D) -> (R, D), under one remat mode."""
    run = {
        "block": recompute(layer),
        "sqrt": recompute(layer),
        "dots": recompute(layer, context_fn=save_dots),
    }.get(remat, layer)

    def span(blocks: list[nn.Module], start: int, x: Tensor) -> Tensor:
        for offset, block in enumerate(blocks):
            x = run(block, start + offset, x)
        return x

    if remat != "sqrt":
        return span(blocks, 0, x)
    segment = recompute(span)
    for layers in segments(len(blocks)):
        x = segment(blocks[layers.start : layers.stop], layers.start, x)
    return x
