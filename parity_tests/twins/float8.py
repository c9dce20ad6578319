"""XLA's own float8 on this CPU."""

import jax
import pytest

from jax_impl.extra.capabilities import compiles_float16


def require_float8() -> None:
    """Skips where XLA has none: it makes float8 of float16."""
    if not compiles_float16(jax.devices("cpu")[0]):
        pytest.skip("XLA makes float8 of float16, which it cannot compile for this CPU")
