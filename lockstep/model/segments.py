"""How `--remat sqrt` cuts the layers."""

import math


def segments(n_layer: int) -> list[range]:
    """The layers of each segment of `--remat sqrt`: floor(√L) segments, the last the longest."""
    n = math.isqrt(n_layer)
    starts = [i * (n_layer // n) for i in range(n)]
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], n_layer])]
