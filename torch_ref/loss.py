"""Cross-entropy, of all logits at once or of a chunk of rows at a time."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.config import chunks as in_chunks
from lockstep.config.policy import Dtypes

from .precision import autocast, dtype
from .remat import recompute


def mean_loss(
    logits_BTV: Tensor,
    targets_BT: Tensor,
    dtypes: Dtypes,
    counts_BT: Tensor | None = None,
    over: Tensor | None = None,
) -> Tensor:
    """Mean cross-entropy in nats, in the output dtype; `over`: see `average`."""
    if counts_BT is not None:
        losses = row_losses(logits_BTV.flatten(0, 1), targets_BT.flatten(), dtypes)
        return average(losses, counts_BT.flatten(), over)
    logits = logits_BTV.to(dtype(dtypes.output))
    return F.cross_entropy(logits.flatten(0, 1), targets_BT.flatten())


def average(losses: Tensor, counts: Tensor | None, over: Tensor | None) -> Tensor:
    """Of all; or the sum of those whose target counts, divided by `over`."""
    if counts is None:
        return losses.mean()
    assert over is not None
    return torch.where(counts, losses, 0).sum() / over.to(losses.dtype)


def row_losses(logits: Tensor, targets: Tensor, dtypes: Dtypes) -> Tensor:
    """Logits (R, V) and targets (R,) -> (R,)."""
    logits = logits.to(dtype(dtypes.output))
    return F.cross_entropy(logits, targets, reduction="none")


def mean_loss_in_chunks(
    head: Callable,
    x_RD: Tensor,
    targets_R: Tensor,
    dtypes: Dtypes,
    chunks: int,
    counts_R: Tensor | None = None,
    over: Tensor | None = None,
) -> Tensor:
    """The same of `head(x_RD)`, whose logits are never all there: the backward pass recomputes
    those of a chunk. Its gradient of the head's weights is added up in their own dtype."""

    def losses_of_chunk(x_RD: Tensor, targets_R: Tensor) -> Tensor:
        # One cast for all chunks would add up their gradients in the compute dtype.
        with autocast(dtypes, x_RD.device, cache=False):
            return row_losses(head(x_RD), targets_R, dtypes)

    rows = in_chunks.size(len(x_RD), chunks)
    run = recompute(losses_of_chunk, preserve_rng_state=False)
    losses = map(run, x_RD.split(rows), targets_R.split(rows))
    return average(torch.cat(list(losses)), counts_R, over)
