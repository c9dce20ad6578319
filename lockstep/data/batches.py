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
    """int32 (N, B, T+1): the training window of one optimizer step, from 0; B of all devices."""
    return _draw(config, tokens, "train", step, config.optim.accum)


def validation(config: Config, tokens: np.ndarray) -> np.ndarray:
    """int32 (M, B, T+1): the windows of the held-out split that every evaluation takes."""
    return _draw(config, tokens, "val", 0, config.run.eval_batches)


def _draw(config: Config, tokens: np.ndarray, split: str, step: int, count: int) -> np.ndarray:
    seed, size, context = config.optim.seed, config.global_batch_size, config.model.context
    given: dict[str, Any] = {"seed": seed, "batch_size": size, "context": context}
    return window(tokens, accum=count, split=split, step=step, **given)
