"""Our fp8 beside other libraries', on a CPU: the same numbers, bit for bit, where their scale is a
power of two, and others where it is not."""

import warnings
from importlib import import_module
from typing import Any

import flax.linen.fp8_ops as theirs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import Array

from jax_impl.extra.formats.products import rounded_linear
from jax_impl.extra.formats.rounding import ROUNDING
from lockstep.formats.table import DELAYED, E4M3, E5M2, HISTORY, Format
from parity_tests.twins.float8 import require_float8
from torch_ref.extra.formats.rounding import Rounding

# --- delayed scaling: flax's layer

# The largest of a history. 448 and 57344 are 14 times powers of two, so their scales are such too.
POWER, ODD = 14.0, 10.0
FLAX_HISTORY = theirs.Fp8DotGeneral.amax_history_length
Answer = tuple[Array, Array, Array, Array]  # y, dx, dweight, amaxes (3,)


def sheet(seed: int, *shape: int) -> Array:
    """Draws sizes from 1/8 to 16, some past 14, and zeros. Sums of products of their float8 numbers
    are exact in float32, in whatever order."""
    random = np.random.default_rng(seed)
    x = random.choice([-1, 1], shape) * np.exp2(random.uniform(-3, 4, shape))
    x[0] = 0
    return jnp.asarray(x, jnp.float32)


ONE = jnp.float32(1)  # the loss scale
X, WEIGHT, DY = sheet(0, 16, 32), sheet(1, 32, 24), sheet(2, 16, 24)


def history(length: int, largest: float) -> Array:
    return jnp.zeros(length).at[0].set(largest)


def ours(largest: float) -> Answer:
    scales = ROUNDING.scales(jnp.stack([history(HISTORY, largest)] * 3), ONE)

    def layer(x: Array, weight: Array, scales: Array) -> Array:
        return rounded_linear(DELAYED, x, weight, None, scales)

    y, back = jax.vjp(layer, X, WEIGHT, scales)
    return y, *back(DY)


def flax(largest: float) -> Answer:
    """Its layer's histories and scales come back as gradients."""
    state = {"scale": jnp.ones(1), "amax_history": history(FLAX_HISTORY, largest)}
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


def test_layer_is_flax_s_under_powers_of_two() -> None:
    """Forward pass, both gradients, numbers that saturate, and what is recorded; otherwise what is
    recorded alone."""
    require_float8()  # ours are rounded in float32, which every CPU has
    assert jnp.abs(X).max() > POWER
    assert all(same(ours(POWER), flax(POWER)))
    assert all(same(ours(0), flax(0)))  # nothing recorded yet: both scale by 1
    assert same(ours(ODD), flax(ODD)) == [False, False, False, True]


# --- current scaling: torchao's numbers


def module(name: str) -> Any:
    with warnings.catch_warnings(action="ignore"):  # of enums, and of kernels for CUDA
        return import_module(f"torchao.{name}")


def many_sizes() -> torch.Tensor:
    """(64, 96) of many sizes, and a row of zeros."""
    generator = torch.Generator().manual_seed(0)
    x, size = torch.randn((2, 64, 96), generator=generator)
    x[0] = 0
    return x * torch.exp(3 * size)


def float8(x: torch.Tensor, kind: torch.dtype, power_of_two: bool) -> torch.Tensor:
    utils, config = module("float8.float8_utils"), module("float8.config")
    scale = utils.tensor_to_scale(
        x,
        kind,
        scaling_granularity=config.ScalingGranularity.TENSORWISE,
        round_scales_to_power_of_2=power_of_two,
    )
    return utils.to_fp8_saturated(x * scale, kind).float() / scale


@pytest.mark.parametrize(("to", "kind"), [(E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)])
def test_fp8_is_torchao_s_under_powers_of_two(to: Format, kind: torch.dtype) -> None:
    ours = Rounding().quantize(many_sizes(), to)
    assert torch.equal(ours, float8(many_sizes(), kind, power_of_two=True))
    assert not torch.equal(ours, float8(many_sizes(), kind, power_of_two=False))
