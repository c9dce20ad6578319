"""`--remat`: the segments and counts of what the backward pass recomputes.

none      keep everything
sublayer  keep each sublayer's input (attention and mlp)
block     keep each block's input
sqrt      keep each segment's input, and while a segment is recomputed each of its blocks' inputs
dots      keep the outputs of the weight matmuls, recompute the rest of each block
"""

import math


def segments(n_layer: int) -> list[range]:
    """Lists the layers of each `--remat sqrt` segment: floor(√L) segments, the last the longest."""
    n = math.isqrt(n_layer)
    starts = [i * (n_layer // n) for i in range(n)]
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], n_layer])]


def recomputed(remat: str, n_layer: int, layer: int) -> tuple[int, int, int]:
    """Counts how often the backward pass reruns a layer's (linears, attention, last linear).

    The last matmul of what is recomputed is not needed, nor is the last block of a segment, which
    is recomputed by itself.
    """
    if remat == "sqrt":
        ends = [span.stop - 1 for span in segments(n_layer)]
        return (1, 1, 0) if layer in ends else (2, 2, 1)
    return {"none": (0, 0, 0), "dots": (0, 1, 0)}.get(remat, (1, 1, 0))
