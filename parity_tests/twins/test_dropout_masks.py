"""Dropout is part of the parity claim: both twins drop the same elements, and scale alike.

Everything here is an equality of bits; nothing has a tolerance but the share that is kept.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.random import threefry_2x32

import jax_impl.dropout
import jax_impl.extra.device
import torch_ref.dropout
from lockstep.model.threefry import encrypt, fold_in
from parity_tests.pair import toy
from torch_ref.dropout import bernoulli
from torch_ref.io.bridge import from_numpy, to_numpy

CPU = torch.device("cpu")
WORDS = st.integers(0, 2**32 - 1)
KEY = (0x9E3779B9, 0xF39CC060)
BASE: dict[str, Any] = {"seed": 3, "step": 20, "micro_step": 1, "layer": 2, "site": "mlp"}
CHANGED: dict[str, Any] = {"seed": 4, "step": 21, "micro_step": 2, "layer": 1, "site": "attention"}
DTYPES = ("float32", "float64", "bfloat16", "float16")


@pytest.fixture(params=[False, True], ids=["x32", "x64"])
def x64(request: pytest.FixtureRequest) -> Iterator[bool]:
    """With and without 64-bit JAX: a float's width decides how many bits `bernoulli` draws."""
    jax_impl.extra.device.configure(toy())  # the twin sets what decides the masks, not this test
    with jax.enable_x64(request.param):
        yield request.param


def jax_key(key: tuple[int, int]) -> jax.Array:
    return jax.random.wrap_key_data(jnp.array(key, jnp.uint32), impl="threefry2x32")


def words(key: jax.Array) -> tuple[int, ...]:
    return tuple(jax.random.key_data(key).tolist())


def jax_bernoulli(key: tuple[int, int], p: float, shape: tuple[int, ...]) -> np.ndarray:
    return np.asarray(jax.random.bernoulli(jax_key(key), jnp.float32(p), shape))


def torch_bernoulli(key: tuple[int, int], p: float, shape: tuple[int, ...]) -> np.ndarray:
    return bernoulli(key, p, torch.Size(shape), CPU).numpy()


def drop(
    framework: str, x: np.ndarray, rate: float, *, strict: bool = True, **key: Any
) -> np.ndarray:
    """Applies a twin's Dropout to x at one place of one step."""
    key = BASE | key
    place = key.pop("layer"), key.pop("site")
    if framework == "jax":
        return np.asarray(jax_impl.dropout.Dropout(rate, **key)(jnp.asarray(x), *place))
    return to_numpy(torch_ref.dropout.Dropout(rate, strict=strict, **key)(from_numpy(x), *place))


def bits(x: np.ndarray) -> np.ndarray:
    return x.view(f"u{x.dtype.itemsize}")


# --- the generator


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(key=st.tuples(WORDS, WORDS), high=WORDS, low=WORDS)
def test_threefry_is_jax_s(key: tuple[int, int], high: int, low: int) -> None:
    words = np.array([high, low], np.uint32)
    theirs = threefry_2x32(np.array(key, np.uint32), words).tolist()
    tensor = torch.from_numpy(words.view(np.int32).copy())
    for array in (words.view(np.int32), tensor):
        encrypt(key, array[:1], array[1:])
    assert words.tolist() == tensor.numpy().view(np.uint32).tolist() == theirs


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(key=st.tuples(WORDS, WORDS), number=WORDS)
def test_fold_in_is_jax_s(key: tuple[int, int], number: int) -> None:
    assert fold_in(key, number) == words(jax.random.fold_in(jax_key(key), np.uint32(number)))


# --- the masks

SHAPES = [(), (0,), (7,), (3, 43, 11), (2**16 + 17,)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bernoulli_is_jax_s(shape: tuple[int, ...], x64: bool) -> None:
    for i, p in enumerate((0.1, 0.5, 0.9, 1 / 3, 1e-6, 1 - 1e-7, 0.0, 1.0)):
        key = fold_in(KEY, i)
        ours, theirs = torch_bernoulli(key, p, shape), jax_bernoulli(key, p, shape)
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype) == (shape, bool)
        assert (ours == theirs).all(), p


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(key=st.tuples(WORDS, WORDS), p=st.floats(0, 1))
def test_bernoulli_is_jax_s_for_any_key_and_probability(key: tuple[int, int], p: float) -> None:
    assert (torch_bernoulli(key, p, (97,)) == jax_bernoulli(key, p, (97,))).all()


# --- the twins' Dropout


def values(dtype: str) -> np.ndarray:
    """All normal numbers of a 16-bit type (XLA's CPU backend flushes others); many of a wider."""
    exponent = {"float16": 0x7C00, "bfloat16": 0x7F80}.get(dtype)
    if exponent is None:
        generator = np.random.Generator(np.random.Philox(5))
        spread = 10.0 ** generator.integers(-30, 30, 2**16)
        return (generator.normal(size=2**16) * spread).astype(dtype)
    every = np.arange(2**16, dtype=np.uint16)
    return every[(every & exponent != 0) & (every & exponent != exponent)].view(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients_are_the_same_bits(dtype: str) -> None:
    """At a rate where dividing by 1 - rate and multiplying by its reciprocal are not the same."""
    if dtype == "float16":
        jax_impl.extra.device.configure(toy(policy="fp16"))  # refuses where XLA has none
    rate = 0.1
    x = values(dtype)
    upstream = x[::-1].copy()
    key = {name: BASE[name] for name in ("seed", "step", "micro_step")}

    @jax.jit
    def both(x: jax.Array, upstream: jax.Array) -> tuple[jax.Array, jax.Array]:
        dropout = jax_impl.dropout.Dropout(rate, **key)
        y, vjp = jax.vjp(lambda x: dropout(x, 2, "mlp"), x)
        return y, *vjp(upstream)

    with jax.enable_x64(dtype == "float64"):
        theirs, their_gradient = both(x, upstream)
    leaf = from_numpy(x).requires_grad_()
    ours = torch_ref.dropout.Dropout(rate, strict=True, **key)(leaf, 2, "mlp")
    ours.backward(from_numpy(upstream))
    assert ours.dtype == leaf.dtype == getattr(torch, dtype) and theirs.dtype == dtype
    assert leaf.grad is not None
    for a, b in ((ours, theirs), (leaf.grad, their_gradient)):
        assert (bits(to_numpy(a)) == bits(np.asarray(b))).all()


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_no_dropout_is_the_identity(framework: str) -> None:
    x = np.ones(10, np.float32)
    assert (drop(framework, x, 0.0) == x).all()
    twins: dict[str, Any] = {"jax": jax_impl.dropout, "torch": torch_ref.dropout}
    assert twins[framework].Dropout.off()(x, 0, "mlp") is x


def test_fast_dropout_repeats_itself_from_the_key() -> None:
    """torch's own generator under fast numerics: other masks, but a resumed run's are its own."""
    x = np.ones(1000, np.float32)
    first = drop("torch", x, 0.5, strict=False)
    torch.rand(7)  # whatever else draws in between
    assert (drop("torch", x, 0.5, strict=False) == first).all()
    for part in ("seed", "step", "micro_step"):
        other = drop("torch", x, 0.5, strict=False, **{part: CHANGED[part]})
        assert 400 < (other != first).sum() < 600, part
