"""The learning rate, in closed form: linear warm-up, then a cosine down to `min_lr`."""

import numpy as np

from lockstep.config import OptimConfig


def learning_rates(optim: OptimConfig) -> np.ndarray:
    """float64 (steps,): the rate of the u-th *update*, u from 0.

    An optimizer step that was skipped made no update, so the schedule stands still on it. Both
    twins index this one table: the rates are the same bytes in both.
    """
    update = np.arange(optim.steps, dtype=np.float64)
    warm = optim.lr * (update + 1) / max(1, optim.warmup)
    progress = (update - optim.warmup) / max(1, optim.steps - optim.warmup)
    cosine = optim.min_lr + 0.5 * (optim.lr - optim.min_lr) * (1 + np.cos(np.pi * progress))
    return np.where(update < optim.warmup, warm, cosine)
