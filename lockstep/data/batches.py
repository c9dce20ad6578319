"""(seed, split, step, micro-step) -> tokens: one pure function, no state.

The windows are drawn by Philox, a counter-based generator: keyed by seed and split, countered by
step and micro-step. Any batch of a run can be drawn at any time, in either framework, at any
world size, and a resumed run draws what the interrupted one would have drawn. A process reads the
rows of its own devices alone.
"""

from typing import Any

import numpy as np

from lockstep.config import Config
from lockstep.data.batch import Batch, split_tokens, stack_batches
from lockstep.data.documents import Documents
from lockstep.errors import require

SPLITS = {"train": 0, "val": 1}


def batch(
    tokens: Any,
    *,
    seed: int,
    split: str,
    step: int,
    micro_step: int,
    batch_size: int,
    context: int,
    own: np.ndarray | None = None,
) -> Batch:
    """Draws a micro-batch, (B, T), of tokens or of documents.

    With `own` only these rows are read, and the others are zeros.

    `random_raw` is used because numpy guarantees its bit stream for ever, which it does not for
    `integers`. The modulo's bias is below n / 2**64.
    """
    bits = np.random.Philox(key=[seed, SPLITS[split]], counter=[0, 0, micro_step, step])
    numbers = bits.random_raw(batch_size)
    drawn = _read(tokens, numbers if own is None else numbers[own], context)
    if own is None:
        return drawn

    def spread(rows: np.ndarray) -> np.ndarray:
        whole = np.zeros((batch_size, context), rows.dtype)
        whole[own] = rows
        return whole

    return drawn.map_arrays(spread)


def _read(tokens: Any, numbers: np.ndarray, context: int) -> Batch:
    if isinstance(tokens, Documents):
        return tokens.draw(numbers, context)
    starts = (numbers % np.uint64(len(tokens) - context)).tolist()
    rows = np.stack([tokens[start : start + context + 1] for start in starts])
    return split_tokens(rows.astype(np.int32))


def of_step(config: Config, tokens: Any, step: int, own: np.ndarray | None = None) -> Batch:
    """Draw the window of one optimizer step of training, from 0; B of all devices."""
    return _draw(config, tokens, "train", step, config.optim.accum, own)


def validation(config: Config, tokens: Any, own: np.ndarray | None = None) -> Batch:
    """Draw the M batches of the held-out split that every evaluation takes."""
    return _draw(config, tokens, "val", 0, config.run.eval_batches, own)


def _draw(
    config: Config, tokens: Any, split: str, step: int, count: int, own: np.ndarray | None
) -> Batch:
    """Draw a window; raise UserError for a token beyond the vocabulary, which no check has seen."""
    seed, size, context = config.optim.seed, config.global_batch_size, config.model.context
    drawn = stack_batches([
        batch(tokens, seed=seed, split=split, step=step, micro_step=n, batch_size=size,
              context=context, own=own)
        for n in range(count)
    ])  # fmt: skip
    largest = max(int(drawn.tokens.max()), int(drawn.targets.max()))
    vocab = config.model.vocab
    remedy = f"token {largest} is drawn, but --vocab is {vocab}; use {largest + 1} or more"
    require(largest < vocab, "--data", config.data.data, remedy)
    return drawn
