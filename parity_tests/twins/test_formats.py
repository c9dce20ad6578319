"""The formats of the table: the reference against `ml_dtypes` and by search, the twins against the
reference, bit for bit."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import torch

import jax_impl.extra.formats.rounding
import torch_ref.extra.formats.rounding
from lockstep.formats.table import E4M3, E5M2, TF32, Format
from parity_tests.twins import reference

JAX, TORCH = jax_impl.extra.formats.rounding.ROUNDING, torch_ref.extra.formats.rounding.Rounding()

FLOAT8 = {"e4m3": E4M3, "e5m2": E5M2}
FORMATS = {"tf32": TF32, **FLOAT8}
ORACLES: dict[str, Any] = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def bits(x: Any) -> np.ndarray:
    return np.asarray(x, np.float32).view(np.uint32)


def patterns(to: Format) -> np.ndarray:
    """Every float16 and bfloat16, random bits of float32, its smallest and largest numbers, and the
    ties of a format and what is next to them, of all its exponents and beyond its largest number.
    """
    halves = np.arange(2**16, dtype=np.uint16)
    known = [halves.view(kind).astype(np.float32) for kind in (np.float16, ml_dtypes.bfloat16)]
    random = np.random.default_rng(0).integers(2**32, size=2**14, dtype=np.uint32)
    places = np.array([0, 0x007FE000, 0x7F000000, 0x7F7FE000], np.uint32)
    last = np.array([1, 0xFFF, 0x1000, 0x1001, 0x1FFF], np.uint32)
    known += [(places[:, None] | last | sign).ravel().view(np.float32) for sign in (0, 1 << 31)]
    exponents = np.arange(max(to.lowest, -120) - 3, min(-to.lowest, 120) + 3)
    steps = np.arange(2 ** (to.mantissa + 3)) if to.mantissa < 7 else np.arange(64)
    ties = np.ldexp(steps / 2 ** (to.mantissa + 2), exponents[:, None]).ravel().astype(np.float32)
    near = [ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(np.inf))]
    signed = [part * sign for part in near for sign in (np.float32(1), np.float32(-1))]
    return np.concatenate([*known, random.view(np.float32), *signed])


@pytest.mark.parametrize("name", ORACLES)
def test_the_reference_is_ml_dtypes(name: str) -> None:
    to = FLOAT8[name]
    x = patterns(to)
    x = x[~np.isnan(x)]
    with np.errstate(over="ignore"):
        theirs = x.astype(ORACLES[name]).astype(np.float32)
    ours = reference.round_to(x, to)
    past = ~np.isfinite(x) | (np.abs(x) > to.largest)
    assert past.any() and (ours[~past] != 0).sum() > 1000
    assert (bits(ours)[~past] == bits(theirs)[~past]).all()
    finite = past & np.isfinite(x)
    assert (np.abs(ours[finite]) == to.largest).all()  # where `ml_dtypes` does not saturate
    assert (~np.isfinite(theirs[finite])).any()


def test_tf32_is_half_of_its_last_place_added_to_the_bits() -> None:
    """A finite number may become infinite; NaN and infinity stay."""
    x = patterns(TF32)
    rounded = reference.round_to(x, TF32)
    finite = np.isfinite(x)
    assert (bits(rounded) == np.where(finite, bits(x) + 0x1000 & 0xFFFFE000, bits(x))).all()
    assert np.isnan(x).sum() > 1000 and np.isinf(x).any()
    assert np.isinf(rounded[finite]).any() and (np.abs(x[rounded == 0]) > 0).any()


@pytest.mark.parametrize("name", ORACLES)
def test_the_table_is_ml_dtypes(name: str) -> None:
    about, to = ml_dtypes.finfo(ORACLES[name]), FLOAT8[name]
    assert (to.largest, to.lowest, to.mantissa) == (float(about.max), about.minexp, about.nmant)
    assert 2.0 ** (to.lowest - to.mantissa) == float(about.smallest_subnormal)


def sheet(seed: int = 0) -> np.ndarray:
    """(64, 96): many sizes, zeros, and one number that dwarfs the rest."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((64, 96)) * np.exp(random.normal(0, 3, (64, 96)))
    x[:, :32] *= 1e-6
    x[0], x[32:, 40], x[5, 6] = 0, 0, 3e4
    return x.astype(np.float32)


def in_jax(x: np.ndarray, to: Format, scale: Any = None) -> np.ndarray:
    return np.asarray(jax.jit(lambda x, scale: JAX.quantize(x, to, scale))(x, scale))


def in_torch(x: np.ndarray, to: Format, scale: Any = None) -> np.ndarray:
    known = None if scale is None else torch.as_tensor(scale)
    # As the twin gives it a weight: transposed.
    columns = torch.from_numpy(np.array(x.T, order="C")).mT
    same = TORCH.quantize(torch.from_numpy(x), to, known).numpy()
    assert (bits(TORCH.quantize(columns, to, known)) == bits(same)).all()
    return same


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("twin", [in_jax, in_torch])
def test_the_twins_round_as_the_reference(twin: Callable, name: str) -> None:
    to = FORMATS[name]
    x = patterns(to)
    small = np.abs(x) < 2.0**-126  # XLA's CPU backend may flush those that no format here has
    x = x if name == "tf32" else np.where(small, 0, x).astype(np.float32)
    checked = ~np.isnan(x) if name == "tf32" else np.isfinite(x)
    unscaled = twin(x[None], to, np.float32(1))[0]
    assert (bits(unscaled)[checked] == bits(reference.round_to(x, to))[checked]).all()
    assert (bits(twin(sheet(), to)) == bits(reference.quantize(sheet(), to))).all()
    if name != "tf32":
        assert not np.isfinite(twin(with_infinity(), to)[3, 4])


def with_infinity() -> np.ndarray:
    x = sheet()
    x[3, 4] = np.inf
    return x


@pytest.mark.parametrize("name", FLOAT8)
def test_a_scale_is_the_least_that_fits(name: str) -> None:
    """By search over all powers of two: nothing saturates, and half of it would not do."""
    to = FLOAT8[name]
    for size in np.abs(np.random.default_rng(2).standard_normal(200)).astype(np.float32):
        for largest in (size, np.float32(to.largest), np.nextafter(np.float32(to.largest), 1e9)):
            scale = reference.power_of_two(largest, to.largest)
            powers = np.exp2(np.arange(-60.0, 60))
            assert scale == powers[powers * to.largest >= largest].min()


@pytest.mark.parametrize("twin", [in_jax, in_torch])
@pytest.mark.parametrize("kind", FLOAT8)
def test_what_is_past_a_known_scale_saturates(twin: Callable, kind: str) -> None:
    """A delayed scale knows nothing of the numbers that it scales: too small or far too large."""
    to = FLOAT8[kind]
    for scale in (2.0**-12, 1.0, 2.0**10):
        ours = twin(sheet(), to, np.float32(scale))
        assert (bits(ours) == bits(reference.round_to(sheet(), to, scale))).all()
        assert np.abs(ours).max() <= to.largest * scale


@pytest.mark.parametrize("wrong", [replace(E4M3, largest=480.0), E5M2])
def test_another_format_is_seen(wrong: Format) -> None:
    assert (bits(reference.quantize(sheet(), E4M3)) != bits(in_torch(sheet(), wrong))).any()
