"""`--remat`: what the backward pass recomputes instead of keeping.

none      keep everything
sublayer  keep each sublayer's input (attention and mlp)
block     keep each block's input
sqrt      keep each segment's input, and while a segment is recomputed each of its blocks' inputs
dots      keep the outputs of the weight matmuls, recompute the rest of each block
"""

import math


def segments(n_layer: int) -> list[range]:
    """The layers of each segment of `--remat sqrt`: floor(√L) segments, the last the longest."""
    n = math.isqrt(n_layer)
    starts = [i * (n_layer // n) for i in range(n)]
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], n_layer])]
