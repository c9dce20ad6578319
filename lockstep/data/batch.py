"""`Batch`: the arrays of a micro-batch, a window or several windows, as one pytree.

A window has arrays (N, B, T): N micro-batches of B rows of T tokens. The windows of S steps have
one axis more in front. Arrays are numpy's, or a framework's once a runner has placed them. `len` of
a `Batch` is its number of fields: N is `window.tokens.shape[0]`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from lockstep.config import Config


class Batch(NamedTuple):
    """Rows of tokens, and a target for each token.

    Args:
        tokens: int32 (..., B, T).
        targets: int32 (..., B, T), the token that follows each; 0 where a target does not count.
        counts: bool (..., B, T), which targets count; None: all, and the loss is a plain mean.
        segments: int32 (..., B, T), runs of one number do not see each other; None: one a row.
    """

    tokens: Any
    targets: Any
    counts: Any = None
    segments: Any = None

    def map_arrays(self, function: Callable[[Any], Any]) -> "Batch":
        """Calls a function on each array that is present."""
        return Batch(*(None if x is None else function(x) for x in self))

    def select(self, index: Any) -> "Batch":
        """Indexes each array, as numpy does: a number takes one batch, None adds an axis."""
        return self.map_arrays(lambda x: x[index])

    def split(self) -> list["Batch"]:
        """Takes the first axis apart: the N batches of a window."""
        return [self.select(i) for i in range(self.tokens.shape[0])]

    def expand_counts(self) -> np.ndarray:
        """Writes out which targets count, bool (..., B, T), of numpy's arrays."""
        return np.ones(self.targets.shape, bool) if self.counts is None else self.counts


def split_tokens(tokens: Any) -> Batch:
    """Makes a plain batch of int32 (..., B, T+1): each token is the target of the one before it."""
    return Batch(tokens[..., :-1], tokens[..., 1:])


def join_tokens(batch: Batch) -> np.ndarray:
    """Returns the int32 (..., B, T+1) that `split_tokens` has split."""
    assert batch.counts is None and batch.segments is None, "not a plain batch"
    return np.concatenate([batch.tokens, batch.targets[..., -1:]], axis=-1)


def stack_batches(batches: Sequence[Batch]) -> Batch:
    """Stacks batches of one form along a new first axis."""
    return Batch(*(None if xs[0] is None else np.stack(xs) for xs in zip(*batches, strict=True)))


def blank_window(config: Config) -> Batch:
    """Makes a plain window of zeros, int32 (N, B, T), with the rows of all devices."""
    shape = config.optim.accum, config.global_batch_size, config.model.context
    return Batch(np.zeros(shape, np.int32), np.zeros(shape, np.int32))
