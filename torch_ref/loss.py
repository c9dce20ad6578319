"""The mean cross-entropy of a batch's targets."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.config.kinds import NO_FLOAT64
from lockstep.data.batch import Batch


def mean_loss(
    logits_BTV: Tensor, batch: Batch, dtype: torch.dtype, target_count: Tensor | None = None
) -> Tensor:
    """Computes the mean cross-entropy in nats.

    Args:
        dtype: the policy's output dtype, that of the result.
        target_count: divides the sum of the losses that count; None: all count, for a mean.
    """
    if batch.counts is None or target_count is None:
        logits = logits_BTV.to(dtype)
        return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
    losses = row_losses(logits_BTV.flatten(0, 1), batch.targets.flatten(), dtype)
    return average(losses, batch.counts.flatten(), target_count)


def row_losses(logits: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    """Logits (R, V) and targets (R,) -> losses (R,)."""
    return F.cross_entropy(logits.to(dtype), targets, reduction="none")


def average(losses: Tensor, counts: Tensor | None, target_count: Tensor | None) -> Tensor:
    """Averages losses (...), or divides the sum of those that count by `target_count`."""
    if counts is None or target_count is None:
        return losses.mean()
    return torch.where(counts, losses, 0).sum() / target_count.to(losses.dtype)


def mean_count(window: Batch) -> Tensor | None:
    """Returns the mean number of targets that count in a micro-batch; None if all do."""
    return None if window.counts is None else share_count(count_targets(window), window)


def count_targets(window: Batch) -> Tensor:
    """Counts the targets of a window that count, in float64 if the device has it."""
    wide = torch.float32 if window.counts.device.type in NO_FLOAT64 else torch.float64
    return window.counts.sum().to(wide)


def share_count(count: Tensor, window: Batch) -> Tensor:
    """Divides a window's count by its N micro-batches (N, B, T).

    At least one in the whole window: without any, the loss and its gradient are 0.
    """
    return torch.where(count > 0, count, 1) / window.counts.shape[0]
