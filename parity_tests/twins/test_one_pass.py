"""A GPU reads a row once, for the loss and in LayerNorm; a CPU, which does not, checks the sums."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl import functional as F

ROWS = np.random.default_rng(0).normal(size=(5, 257)) * 30
EXACT = np.log(np.exp(ROWS - ROWS.max(-1, keepdims=True)).sum(-1)) + ROWS.max(-1)


def errors(x: jax.Array) -> np.ndarray:
    return np.abs(np.asarray(F.logsumexp(x)) - EXACT)


def test_one_pass_is_the_sum() -> None:
    with jax.enable_x64(True):
        assert errors(jnp.asarray(ROWS)).max() < 1e-13
        assert errors(jnp.asarray(ROWS).at[0, 0].add(200)).max() > 1e-3  # a wrong logit shows


def test_what_is_not_finite_stays_so() -> None:
    rows = jnp.array([[jnp.inf, 0.0], [jnp.nan, 0.0], [-jnp.inf, 1.0]], jnp.float32)
    found = F.logsumexp(rows)
    assert not jnp.isfinite(found[:2]).any() and found[2] == 1


def test_moments_in_one_pass_are_those_in_two() -> None:
    """Also of a large mean, where E[x^2] - E[x]^2 has few digits left."""
    far = jnp.asarray(ROWS + 1e5, "float32")
    exact = np.asarray(far, "float64").var(-1, keepdims=True)
    mean, variance = F.moments_in_one_pass(far)
    np.testing.assert_allclose(mean, np.asarray(far, "float64").mean(-1, keepdims=True), rtol=1e-6)
    np.testing.assert_allclose(variance, exact, rtol=1e-3)
    naive = jnp.square(far).mean(-1, keepdims=True) - jnp.square(far.mean(-1, keepdims=True))
    assert (np.abs(naive / exact - 1) > 0.1).any()
    with jax.enable_x64(True):
        rows = jnp.asarray(ROWS)
        for found, wanted in zip(F.moments_in_one_pass(rows), F.moments(rows)):
            np.testing.assert_allclose(found, wanted, rtol=1e-13)
