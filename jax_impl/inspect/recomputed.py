"""Tells from the compiled step if its backward pass recomputes its forward pass."""

import re
from typing import Any

# In the names that JAX gives to operations: a matmul, or a kernel of attention, that
# `jax.checkpoint` runs again. Norms and activations do so without `--remat`, too.
AGAIN = re.compile(r'rematted_computation/[^"]*(dot_general|attention|mha)')


def recomputed(compiled: Any) -> bool | None:
    """Says if a compiled step has what `jax.checkpoint` runs again; None without its text.

    What attention in blocks and chunks of the loss run again is not told apart from remat.
    """
    text = compiled.as_text() if hasattr(compiled, "as_text") else ""
    return bool(AGAIN.search(text)) if text else None
