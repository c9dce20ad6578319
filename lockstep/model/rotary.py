"""The rotary embedding's table (Su et al. 2021, arXiv:2104.09864), in the half-split layout."""

import numpy as np

from lockstep.config.rope import Rope


def table(context: int, head_dim: int, rope: Rope) -> tuple[np.ndarray, np.ndarray]:
    """Computes float64 cos and sin, each (T, K/2); channel j rotates with channel j + K/2."""
    angles = np.arange(context, dtype=np.float64)[:, None] * rates(head_dim, rope)
    return np.cos(angles), np.sin(angles)


def rates(head_dim: int, rope: Rope) -> np.ndarray:
    """Computes radians per token, float64 (K/2,), with Llama 3's scaling (arXiv:2407.21783)."""
    plain = rope.base ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.factor == 1:
        return plain
    turns = rope.original * plain / (2 * np.pi)
    kept = np.clip((turns - rope.low) / (rope.high - rope.low), 0, 1)
    return plain * (kept + (1 - kept) / rope.factor)
