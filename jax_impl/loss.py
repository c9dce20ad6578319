"""The mean cross-entropy of a batch's targets."""

import jax.numpy as jnp
from jax import Array

from lockstep.data.batch import Batch

from . import functional as F


def mean_loss(
    logits_BTV: Array, batch: Batch, dtype: jnp.dtype, target_count: Array | None = None
) -> Array:
    """Computes the mean cross-entropy in nats.

    Args:
        dtype: the policy's output dtype, that of the result.
        target_count: divides the sum of the losses that count; None: all count, for a mean.
    """
    return average(row_losses(logits_BTV, batch.targets, dtype), batch.counts, target_count)


def row_losses(logits: Array, targets: Array, dtype: jnp.dtype) -> Array:
    """Logits (..., V) and targets (...) -> losses (...)."""
    return F.cross_entropy(logits, targets).astype(dtype)


def average(losses: Array, counts: Array | None, target_count: Array | None) -> Array:
    """Averages losses (...), or divides the sum of those that count by `target_count`."""
    if counts is None or target_count is None:
        return losses.mean()
    return jnp.where(counts, losses, 0).sum() / target_count.astype(losses.dtype)


def mean_count(window: Batch) -> Array | None:
    """Returns the mean number of targets that count in a micro-batch; None if all do.

    At least one in the whole window (N, B, T): without any, the loss and its gradient are 0.
    """
    if window.counts is None:
        return None
    return jnp.maximum(window.counts.sum(), 1) / window.counts.shape[0]
