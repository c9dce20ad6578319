"""What a window carries: int32 tokens (..., B, T+1), or planes (..., P, B, T).

Of tokens alone each is the target of those before it. Planes say more: the tokens, the target of
each, and where there are three the segments. A target of IGNORED does not count. Functions take the
arrays of any framework.
"""

from typing import Any

import numpy as np

from lockstep.config import Config

IGNORED = -100  # PyTorch's cross_entropy and transformers' labels have it, too


def planes(batch: Any) -> tuple[Any, Any, Any]:
    """Tokens, targets and segments or None, each (B, T), of one batch."""
    if batch.ndim == 2:
        return batch[:, :-1], batch[:, 1:], None
    tokens, targets, *segments = batch
    return tokens, targets, segments[0] if segments else None


def has_segments(window: Any) -> bool:
    """Whether tokens of a row may not see each other."""
    return window.ndim == 4 and window.shape[1] > 2


def blank(config: Config) -> np.ndarray:
    """A plain window of zeros, of all devices."""
    rows, length = config.global_batch_size, config.model.context + 1
    return np.zeros((config.optim.accum, rows, length), np.int32)


def join(*planes: np.ndarray) -> np.ndarray:
    """Planes (..., B, T) -> int32 (..., P, B, T)."""
    return np.stack(planes, axis=-3).astype(np.int32)


def tokens(batches: np.ndarray) -> np.ndarray:
    """The tokens of (K, B, T+1) or (K, P, B, T), as (K, B, T+1 or T)."""
    return batches if batches.ndim == 3 else batches[:, 0]
