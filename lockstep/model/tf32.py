"""TF32 by its definition, as PTX's `cvt.rna.tf32.f32` rounds: the reference of both twins.

A float32 keeps its exponent and 10 of 23 bits of mantissa: to nearest, ties away from zero. Zeros,
infinities and NaNs stay; past the largest number lies infinity.
"""

import numpy as np

MASK = 0xFFFFE000  # of the bits that stay: sign, 8 of exponent, 10 of mantissa
HALF = 0x1000  # half of the last of them


def round_to_tf32(x: np.ndarray) -> np.ndarray:
    """float32 of any shape -> float32."""
    # The mantissa carries into the exponent, and from the largest number to infinity, as it should.
    rounded = (x.view(np.uint32) + np.uint32(HALF)) & np.uint32(MASK)
    return np.where(np.isnan(x), x, rounded.view(np.float32))
