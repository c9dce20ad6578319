"""Products in bfloat16 in the one form that XLA has a fast kernel for on a CPU."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ..functional import affine_by

LIBRARY = "ynnpack"
EXISTS = jax.__version_info__ < (0, 11)  # later it is switched off: `precision.compiler_options`


def multiply(a: Array, b: Array, preferred_element_type: Any = None) -> Array:
    """`jnp.matmul`: float32 is asked for and rounded here; both operands lie in memory row by row.

    That is the form that XLA hands to YNNPACK.
    """
    y = jnp.matmul(lay_out(a), lay_out(b), preferred_element_type=jnp.float32)
    return y.astype(preferred_element_type or jnp.promote_types(a.dtype, b.dtype))


def lay_out(x: Array) -> Array:
    # A transposed operand is only a view to XLA, until something wants it flat.
    return jax.lax.optimization_barrier(x.reshape(-1)).reshape(x.shape)


linear = affine_by(multiply)
