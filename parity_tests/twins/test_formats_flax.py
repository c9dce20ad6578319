"""Our formats against flax's fp8 ops and against qwix, on a CPU: the same numbers, bit for bit,
where their scale is a power of two, and others where it is not."""

from typing import Any

import flax.linen.fp8_ops as theirs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from jax import Array

from jax_impl.extra.formats.products import rounded_linear
from jax_impl.extra.formats.rounding import ROUNDING
from lockstep.formats.table import DELAYED, E4M3, E5M2, HISTORY, Format
from parity_tests.twins.float8 import require_float8

# The largest of a history. 448 and 57344 are 14 times powers of two, so their scales are such too.
POWER, ODD = 14.0, 10.0
FLAX_HISTORY = theirs.Fp8DotGeneral.amax_history_length
Answer = tuple[Array, Array, Array, Array]  # y, dx, dweight, amaxes (3,)


@pytest.fixture(autouse=True)
def _theirs_are_float8() -> None:
    """Ours are rounded in float32, which every CPU has."""
    require_float8()


def sheet(seed: int, *shape: int) -> Array:
    """Draws sizes from 1/8 to 16, some past 14, and zeros. Sums of products of their float8 numbers
    are exact in float32, in whatever order."""
    random = np.random.default_rng(seed)
    x = random.choice([-1, 1], shape) * np.exp2(random.uniform(-3, 4, shape))
    x[0] = 0
    return jnp.asarray(x, jnp.float32)


ONE = jnp.float32(1)  # the loss scale
X, WEIGHT, DY = sheet(0, 16, 32), sheet(1, 32, 24), sheet(2, 16, 24)


def history(length: int, largest: float, at: int) -> Array:
    return jnp.zeros(length).at[at].set(largest)


def ours(largest: float, at: int = 0) -> Answer:
    scales = ROUNDING.scales(jnp.stack([history(HISTORY, largest, at)] * 3), ONE)

    def layer(x: Array, weight: Array, scales: Array) -> Array:
        return rounded_linear(DELAYED, x, weight, None, scales)

    y, back = jax.vjp(layer, X, WEIGHT, scales)
    return y, *back(DY)


def flax(largest: float, at: int = 0) -> Answer:
    """Its layer's histories and scales come back as gradients."""
    state = {"scale": jnp.ones(1), "amax_history": history(FLAX_HISTORY, largest, at)}
    given = {f"{operand}_{name}": value for operand in ("lhs", "rhs", "grad")
             for name, value in state.items()}  # fmt: skip

    def layer(x: Array, weight: Array, given: dict[str, Array]) -> Array:
        return theirs.fp8_scaled_dot_general(
            x, weight, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32, **given
        )

    y, back = jax.vjp(layer, X, WEIGHT, given)
    dx, dweight, new = back(DY)
    newest = [new[f"{operand}_amax_history"][0] for operand in ("lhs", "rhs", "grad")]
    return y, dx, dweight, jnp.stack(newest)


def same(one: Any, other: Any) -> list[bool]:
    return [np.array_equal(*pair) for pair in zip(one, other, strict=True)]


def test_a_layer_is_flax_s_under_powers_of_two() -> None:
    """Forward pass, both gradients, numbers that saturate, and what is recorded."""
    assert jnp.abs(X).max() > POWER
    assert all(same(ours(POWER), flax(POWER)))
    assert all(same(ours(0), flax(0)))  # nothing recorded yet: both scale by 1


def test_flax_s_scale_is_no_power_of_two() -> None:
    """So every product differs; what is recorded does not go by it."""
    assert same(ours(ODD), flax(ODD)) == [False, False, False, True]


def test_flax_looks_back_further() -> None:
    assert FLAX_HISTORY > HISTORY
    last = HISTORY - 1
    assert all(same(ours(POWER, last), flax(POWER, last)))
    assert same(ours(0), flax(POWER, HISTORY))[:3] == [False] * 3


def test_an_infinity_stays_in_flax_s_history() -> None:
    """While it is there the scale stays as it was. We record none."""
    recorded = ROUNDING.record(jnp.ones((3, HISTORY)), jnp.array([jnp.inf, 3, 3]), ONE)
    assert recorded.max() == 3 and recorded[0, 0] == 0
    endless = theirs.compute_amax_history(jnp.array([jnp.inf]), jnp.ones(FLAX_HISTORY))
    scale, _ = theirs.update_fp8_meta(X, jnp.float8_e4m3fn, jnp.full(1, 0.25), endless)
    assert endless[0] == jnp.inf and scale == 0.25


def test_a_nan_is_one_in_both() -> None:
    scale = jnp.full(1, 2.0**-5)
    for number, same in ((jnp.nan, True), (jnp.inf, False)):
        x = jnp.array([[1.0, number]])
        flax_s = theirs.qdq(x, jnp.float8_e4m3fn, scale, jnp.float32)
        assert bool(jnp.isnan(flax_s).any()) is same
        assert np.array_equal(ROUNDING.quantize(x, E4M3, scale), flax_s, equal_nan=True)


# --- qwix


def in_qwix(x: Array, kind: Any) -> Array:
    return qwix.dequantize(qwix.quantize(x, kind))


@pytest.mark.parametrize(("to", "kind"), [(E4M3, jnp.float8_e4m3fn), (E5M2, jnp.float8_e5m2)])
def test_fp8_is_qwix_s_under_powers_of_two(to: Format, kind: Any) -> None:
    powers, odd = (X.at[:, 0].set(largest) for largest in (2 * POWER, 2 * ODD))
    assert np.array_equal(ROUNDING.quantize(powers, to), in_qwix(powers, kind))
    assert not np.array_equal(ROUNDING.quantize(odd, to), in_qwix(odd, kind))
