"""(seed, split, step, micro-step) -> tokens: one pure function, no state.

The windows are drawn by Philox, a counter-based generator: keyed by seed and split, countered by
step and micro-step. Any batch of a run can be drawn at any time, in either framework, at any
world size, and a resumed run draws what the interrupted one would have drawn.
"""

from typing import Any

import numpy as np

from lockstep.config import Config

SPLITS = {"train": 0, "val": 1}


def batch(
    tokens: np.ndarray,
    *,
    seed: int,
    split: str,
    step: int,
    micro_step: int,
    batch_size: int,
    context: int,
) -> np.ndarray:
    """int32 (B, T+1): inputs are [:, :-1], targets [:, 1:].

    `random_raw` is used because numpy guarantees its bit stream for ever, which it does not for
    `integers`. The modulo's bias is below n / 2**64.
    """
    bits = np.random.Philox(key=[seed, SPLITS[split]], counter=[0, 0, micro_step, step])
    starts = bits.random_raw(batch_size) % np.uint64(len(tokens) - context)
    return tokens[starts.astype(np.int64)[:, None] + np.arange(context + 1)].astype(np.int32)


def window(tokens: np.ndarray, *, accum: int, **which: Any) -> np.ndarray:
    """int32 (N, B, T+1): the N micro-batches of one optimizer step."""
    return np.stack([batch(tokens, micro_step=n, **which) for n in range(accum)])


def of_step(config: Config, tokens: np.ndarray, step: int) -> np.ndarray:
    """int32 (N, B, T+1): the training window of one optimizer step, from 0."""
    return window(
        tokens,
        accum=config.optim.accum,
        seed=config.optim.seed,
        split="train",
        step=step,
        batch_size=config.optim.batch_size,
        context=config.model.context,
    )
