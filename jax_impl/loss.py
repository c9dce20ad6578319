"""Cross-entropy, of all logits at once or of a chunk of rows at a time."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from lockstep.config import chunks as in_chunks
from lockstep.config.policy import Dtypes

from . import functional as F
from .remat import recompute


def mean_loss(
    logits_BTV: Array,
    targets_BT: Array,
    dtypes: Dtypes,
    counts_BT: Array | None = None,
    over: Array | None = None,
) -> Array:
    """Mean cross-entropy in nats, in the output dtype; `over`: see `average`."""
    return average(row_losses(logits_BTV, targets_BT, dtypes), counts_BT, over)


def average(losses: Array, counts: Array | None, over: Array | None) -> Array:
    """Of all; or the sum of those whose target counts, divided by `over`."""
    if counts is None:
        return losses.mean()
    assert over is not None
    return jnp.where(counts, losses, 0).sum() / over.astype(losses.dtype)


def row_losses(logits: Array, targets: Array, dtypes: Dtypes) -> Array:
    """Logits (..., V) and targets (...) -> (...)."""
    return F.cross_entropy(logits, targets).astype(dtypes.output)


def mean_loss_in_chunks(
    head: Callable,
    x_RD: Array,
    targets_R: Array,
    dtypes: Dtypes,
    chunks: int,
    counts_R: Array | None = None,
    over: Array | None = None,
) -> Array:
    """The same of `head(x_RD)`, whose logits are never all there: the backward pass recomputes
    those of a chunk. Its gradient of the head's weights is added up in their own dtype."""

    def losses_of_chunk(x_RD: Array, targets_R: Array) -> Array:
        return row_losses(head(x_RD), targets_R, dtypes)

    rows = in_chunks.size(len(x_RD), chunks)
    run = recompute(losses_of_chunk)
    whole = len(x_RD) // rows * rows
    stacked = (x_RD[:whole].reshape(-1, rows, x_RD.shape[1]), targets_R[:whole].reshape(-1, rows))
    losses_R = jax.lax.map(lambda chunk: run(*chunk), stacked).reshape(-1)
    if whole < len(x_RD):
        losses_R = jnp.concatenate([losses_R, run(x_RD[whole:], targets_R[whole:])])
    return average(losses_R, counts_R, over)
