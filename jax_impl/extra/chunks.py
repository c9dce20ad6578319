"""The loss in chunks of rows: the logits of one chunk alone are in memory."""

import jax
import jax.numpy as jnp
from jax import Array

from lockstep.config import chunks as in_chunks
from lockstep.data.batch import Batch

from .. import loss
from ..dropout import Dropout
from ..model import GPT


def batch_loss(
    chunks: int,
    model: GPT,
    batch: Batch,
    dropout: Dropout | None = None,
    target_count: Array | None = None,
) -> Array:
    """Computes `step.batch_loss` with the logits of one chunk of rows at a time."""
    x_RD = model.hidden(batch, dropout)
    target_count = loss.mean_count(batch.select(None)) if target_count is None else target_count
    return mean_loss_in_chunks(model, x_RD, batch, chunks, target_count)


def mean_loss_in_chunks(
    model: GPT, x_RD: Array, batch: Batch, chunks: int, target_count: Array | None = None
) -> Array:
    """Mean cross-entropy of `model.logits(x_RD)`; the backward pass makes a chunk's logits again.

    The gradient of the head's weight is added up in the weight's own dtype.
    """
    targets_R = batch.targets.reshape(-1)
    counts_R = None if batch.counts is None else batch.counts.reshape(-1)

    def losses_of_chunk(x_RD: Array, targets_R: Array) -> Array:
        return loss.row_losses(model.logits(x_RD), targets_R, model.output_dtype)

    rows = in_chunks.size(len(x_RD), chunks)
    run = jax.checkpoint(losses_of_chunk)
    whole = len(x_RD) // rows * rows
    stacked = (x_RD[:whole].reshape(-1, rows, x_RD.shape[1]), targets_R[:whole].reshape(-1, rows))
    losses_R = jax.lax.map(lambda chunk: run(*chunk), stacked).reshape(-1)
    if whole < len(x_RD):
        losses_R = jnp.concatenate([losses_R, run(x_RD[whole:], targets_R[whole:])])
    return loss.average(losses_R, counts_R, target_count)
