"""A GPU computes the loss, LayerNorm and attention in fewer kernels; a CPU, which does not, checks
the sums."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl import functional as F
from jax_impl.extra import gpu

ROWS = np.random.default_rng(0).normal(size=(5, 257)) * 30


def test_moments_in_one_pass_are_those_in_two() -> None:
    """Also of a large mean, where E[x^2] - E[x]^2 has few digits left.

    There a mean is rounded by up to 0.004, a ten-thousandth of the rows' spread of 30: the bounds
    are ten such, and 16 roundings of the mean. In float64 a mean near zero magnifies 257 of 1e-16.
    """
    far = jnp.asarray(ROWS + 1e5, "float32")
    exact = np.asarray(far, "float64").var(-1, keepdims=True)
    mean, variance = gpu.moments_in_one_pass(far)
    np.testing.assert_allclose(mean, np.asarray(far, "float64").mean(-1, keepdims=True), rtol=1e-6)
    np.testing.assert_allclose(variance, exact, rtol=1e-3)
    naive = jnp.square(far).mean(-1, keepdims=True) - jnp.square(far.mean(-1, keepdims=True))
    assert (np.abs(naive / exact - 1) > 0.1).any()
    with jax.enable_x64(True):
        rows = jnp.asarray(ROWS)
        for found, wanted in zip(gpu.moments_in_one_pass(rows), F.moments(rows)):
            np.testing.assert_allclose(found, wanted, rtol=1e-13)


@pytest.mark.parametrize("far", [0, -200, 200])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loss_of_a_gpu_is_its_definition(
    monkeypatch: pytest.MonkeyPatch, far: float, dtype: str
) -> None:
    """In float32 the exponentials of rows near -200 are zeros and near 200 infinite, so the
    maximum must be that of the row. One value is -inf, as of a masked token."""

    def of_gpu(*args: Any, default: Any, **platforms: Any) -> Any:
        return default(*args)

    monkeypatch.setattr(jax.lax, "platform_dependent", of_gpu)
    logits = jnp.asarray(ROWS + far, dtype).at[0, 7].set(-jnp.inf)
    targets, dy = jnp.arange(5) * 50 + 1, jnp.linspace(0.2, 1, 5)
    losses, backward = jax.vjp(lambda x: F.cross_entropy(x, targets), logits)
    found = np.asarray(backward(dy)[0], "float64")
    exact = np.asarray(logits, "float64")
    log_sums = np.log(np.exp(exact - far).sum(-1)) + far
    # Differences of numbers of up to 300, which float32 holds to 2e-5; so are the exponents.
    np.testing.assert_allclose(losses, log_sums - exact[np.arange(5), targets], rtol=0, atol=1e-4)
    wanted = np.exp(exact - log_sums[:, None]) - (np.arange(257) == np.asarray(targets)[:, None])
    rounded = float(jnp.finfo(dtype).eps)  # the gradient has the dtype of the logits
    np.testing.assert_allclose(found, wanted * np.asarray(dy)[:, None], rtol=rounded, atol=1e-4)


NORMS = {
    "core": F.layer_norm,
    "one pass": partial(gpu.layer_norm, one_kernel=False),
    "one kernel": partial(gpu.layer_norm, one_kernel=True),
}


@pytest.mark.parametrize("layer_norm", NORMS.values(), ids=NORMS)
def test_layer_norm_has_the_derivative_of_its_definition(layer_norm: Any) -> None:
    def definition(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
        x = x - x.mean(-1, keepdims=True)
        return x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5) * weight + bias

    with jax.enable_x64(True):
        args, dy = [jnp.asarray(a) for a in (ROWS, ROWS[0], ROWS[1])], jnp.asarray(ROWS[::-1])
        found, backward = jax.vjp(lambda *args: layer_norm(*args, eps=1e-5), *args)
        wanted, derivative = jax.vjp(definition, *args)
        for left, right in zip((found, *backward(dy)), (wanted, *derivative(dy))):
            # 257 terms of up to 486, each rounded by at most 3e-14.
            np.testing.assert_allclose(left, right, rtol=1e-12, atol=1e-11)


def test_heads_are_cut_as_they_are_split() -> None:
    """Grouped, so that keys and values are narrower than queries."""
    x = jnp.arange(2 * 3 * 8 * 2, dtype="bfloat16").reshape(2, 3, 8, 2)
    for split in (partial(jnp.split, axis=2), gpu.cut_heads):
        parts, backward = jax.vjp(lambda x, split=split: split(x, (4, 6)), x)
        assert [part.shape[2] for part in parts] == [4, 2, 2]
        assert (backward(parts)[0] == x).all()
        assert not (backward([parts[0], *parts[:0:-1]])[0] == x).all()
