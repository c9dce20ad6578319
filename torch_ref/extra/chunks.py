"""The loss in chunks of rows: the logits of one chunk alone are in memory."""

from typing import Any

import torch
from torch import Tensor

from lockstep.config import chunks as in_chunks
from lockstep.config.policy import Roles
from lockstep.data.batch import Batch

from .. import loss
from ..dropout import Dropout
from ..precision import autocast, dtype
from ..remat import recompute


def batch_loss(
    chunks: int,
    model: Any,
    batch: Batch,
    roles: Roles,
    dropout: Dropout | None = None,
    target_count: Tensor | None = None,
) -> Tensor:
    """Computes `step.batch_loss` with the logits of one chunk of rows at a time."""
    target_count = loss.mean_count(batch.select(None)) if target_count is None else target_count
    with autocast(roles, batch.tokens.device):
        x_RD = model.hidden(batch, dropout)
        return mean_loss_in_chunks(model, x_RD, batch, roles, chunks, target_count)


def mean_loss_in_chunks(
    model: Any,
    x_RD: Tensor,
    batch: Batch,
    roles: Roles,
    chunks: int,
    target_count: Tensor | None = None,
) -> Tensor:
    """Mean cross-entropy of `model.logits(x_RD)`; the backward pass makes a chunk's logits again.

    The gradient of the head's weight is added up in the weight's own dtype.
    """
    targets_R = batch.targets.flatten()
    counts_R = None if batch.counts is None else batch.counts.flatten()

    def losses_of_chunk(x_RD: Tensor, targets_R: Tensor) -> Tensor:
        # Each chunk casts the head's weight, so that gradients are added up in its own dtype.
        with autocast(roles, x_RD.device):
            return loss.row_losses(model.logits(x_RD), targets_R, dtype(roles.output))

    rows = in_chunks.size(len(x_RD), chunks)
    run = recompute(losses_of_chunk, preserve_rng_state=False)
    losses = map(run, x_RD.split(rows), targets_R.split(rows))
    return loss.average(torch.cat(list(losses)), counts_R, target_count)
