"""The figures of a difference, and what the measurements share."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
import torch
from torch import Tensor

import jax_impl.precision
from lockstep.parity.toy import toy
from torch_ref.io.bridge import from_numpy, to_numpy

BF16 = ml_dtypes.bfloat16
CPU = torch.device("cpu")
PACKAGES = ("jax", "flax", "optax", "jmp", "torch")
POISON = 255  # the token whose embedding is infinite
WINDOWS, ACCUM = 4, 2  # the second micro-batch of all overflows, and with it the first window


class Figures(NamedTuple):
    """One figure, taken of a library's default and of the twins' own functions."""

    default: float
    ours: float


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.Generator(np.random.Philox(seed)).standard_normal(shape, np.float32)


def bit_equal(a: Any, b: Any) -> float:
    """Share of elements with the same bits."""
    a, b = (np.ascontiguousarray(x) for x in (a, b))
    assert a.dtype == b.dtype and a.shape == b.shape
    return float((a.view(f"u{a.itemsize}") == b.view(f"u{b.itemsize}")).mean())


def error(a: Any, truth: Any) -> float:
    """Relative error in the 2-norm."""
    a, truth = (np.asarray(x, np.float64) for x in (a, truth))
    return float(np.linalg.norm(a - truth) / np.linalg.norm(truth))


def as_torch(x: Any) -> Tensor:
    return from_numpy(np.asarray(x))


def gradient_of(leaf: Tensor) -> np.ndarray:
    assert leaf.grad is not None
    return to_numpy(leaf.grad)


def strict_jit(function: Callable) -> Callable:
    """Compiles a function as the JAX twin compiles its step under strict numerics."""
    options = jax_impl.precision.compiler_options(toy().precision, "cpu")
    return jax.jit(function, compiler_options=options)
