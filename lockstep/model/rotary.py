"""The rotary embedding's table (Su et al. 2021, arXiv:2104.09864), in the half-split layout."""

import numpy as np

BASE = 10_000.0


def table(context: int, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """float64 cos and sin, each (T, K/2). Channel j turns with channel j + K/2."""
    rates = BASE ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    angles = np.arange(context, dtype=np.float64)[:, None] * rates
    return np.cos(angles), np.sin(angles)
