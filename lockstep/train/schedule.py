"""The learning rate, in closed form: linear warm-up, then `--schedule` down to `min_lr`."""

import numpy as np

from lockstep.config import OptimConfig

# How much of the way down is left when a share of the updates is made.
LEFT = {
    "cosine": lambda progress: 0.5 * (1 + np.cos(np.pi * progress)),
    "linear": lambda progress: 1 - progress,
    "constant": lambda progress: np.ones_like(progress),
}


def learning_rates(optim: OptimConfig) -> np.ndarray:
    """Computes float64 (steps,): the rate of the u-th *update*, u from 0.

    An optimizer step that was skipped made no update, so the schedule stands still on it. Both
    twins index this one table: the rates are the same bytes in both.
    """
    update = np.arange(optim.steps, dtype=np.float64)
    warm = optim.lr * (update + 1) / max(1, optim.warmup)
    progress = (update - optim.warmup) / max(1, optim.steps - optim.warmup)
    falling = optim.min_lr + (optim.lr - optim.min_lr) * LEFT[optim.schedule](progress)
    return np.where(update < optim.warmup, warm, falling)
