"""The float32 kernel of a GPU, interpreted on a CPU: it is attention written out."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl.extra.attention import TRITON, flash_attention, make_attention
from jax_impl.extra.packed import Segments
from jax_impl.model import Positions, attend
from jax_impl.precision import make_policy
from lockstep.config.policy import POLICIES
from lockstep.model.attention import AttentionChoice, has_flash

ONE_ULP = 2.0**-23
POLICY = make_policy(POLICIES["fp32"])


@pytest.fixture(autouse=True)
def _without_int64() -> Iterator[None]:
    """Interpreted, JAX's kernel divides int32 by what is int64 otherwise."""
    with jax.enable_x64(False):
        yield


@pytest.mark.parametrize("d_head", [16, 96], ids=["narrow", "wide"])
def test_the_kernel_is_attention(d_head: int) -> None:
    """To rounding: sums of 128 products, in another order."""
    q, k, v, dy = np.random.default_rng(0).normal(size=(4, 2, 128, 2, d_head)).astype("float32")

    def gradients(attention: Any) -> list[np.ndarray]:
        y, backward = jax.vjp(attention, q, k, v)
        return [np.asarray(x) for x in (y, *backward(jnp.asarray(dy)))]

    kernel = gradients(lambda *qkv: flash_attention(*qkv, interpret=True))
    exact = gradients(lambda q, k, v: attend(q, k, v, Positions(128), policy=POLICY))
    swapped = gradients(lambda q, k, v: flash_attention(k, q, v, interpret=True))
    for found, wanted, wrong in zip(kernel, exact, swapped, strict=True):
        tolerance = 128 * ONE_ULP * np.abs(wanted).max()
        assert np.abs(found - wanted).max() < tolerance < np.abs(wrong - wanted).max()


def test_what_it_does_not_take_is_written_out() -> None:
    """Segments, and lengths that are no whole number of tiles; sums of 48 products."""
    q, k, v = jnp.asarray(np.random.default_rng(1).normal(size=(3, 1, 48, 2, 16)), "float32")
    attend_flash = make_attention(AttentionChoice(TRITON), POLICY, jnp.einsum, on_cpu=False)
    for places in (Positions(48), Segments.of(jnp.arange(48)[None] // 24)):
        assert not has_flash(48, 16)
        found = attend_flash(q, k, v, places)
        wanted = attend(q, k, v, places, policy=POLICY)
        assert jnp.abs(found - wanted).max() < 48 * ONE_ULP * jnp.abs(wanted).max()
