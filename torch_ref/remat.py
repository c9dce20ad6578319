"""Rematerialization. What each mode keeps: see `lockstep.model.segments`."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from lockstep.model.segments import segments
from torch_ref.dropout import Dropout

# Matmuls without a batch dimension are the weights'; those of attention are bmm.
WEIGHT_MATMULS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}


def save_dots(context, op, *args, **kwargs) -> CheckpointPolicy:  # type: ignore[no-untyped-def]
    keep = op in WEIGHT_MATMULS
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


recompute = partial(checkpoint, use_reentrant=False)
recompute_but_dots = partial(
    recompute, context_fn=partial(create_selective_checkpoint_contexts, save_dots)
)


def remat_sublayer(sublayer: Callable[[Tensor], Tensor], remat: str) -> Callable[[Tensor], Tensor]:
    return partial(recompute, sublayer) if remat == "sublayer" else sublayer


def through_blocks(blocks: nn.ModuleList, x: Tensor, dropout: Dropout, *, remat: str) -> Tensor:
    """The blocks in order, x (B, T, D) -> (B, T, D), under one remat mode."""
    run = {"block": recompute, "sqrt": recompute, "dots": recompute_but_dots}.get(remat, _call)

    def span(start: int, stop: int, x: Tensor) -> Tensor:
        for layer in range(start, stop):
            x = run(blocks[layer], x, layer, dropout)
        return x

    if remat != "sqrt":
        return span(0, len(blocks), x)
    for segment in segments(len(blocks)):
        x = recompute(span, segment.start, segment.stop, x)
    return x


def _call(function, *args):  # type: ignore[no-untyped-def]
    return function(*args)
