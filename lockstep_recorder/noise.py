"""Noise of a program in numpy: weights that move by an ulp, and how far results part then.

`lockstep.judge.noise` measures gaps by the same function.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping

import numpy as np

Arrays = dict[str, np.ndarray]
STATISTICS = re.compile(r"(^|[._])(mean|var)$")  # running ones, by the last word of their names
# The distance from 1 to the next larger number of a format.
ULPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
NUDGES = 3  # runs from which noise is measured
SPREAD = 0.02  # of a weight that is constant; of others a tenth of its standard deviation


def is_statistic(name: str, side: Container[str]) -> bool:
    """Says if a buffer is a running mean or variance: it has the other beside it."""
    other = f"{name[:-4]}var" if name.endswith("mean") else f"{name[:-3]}mean"
    return bool(STATISTICS.search(name)) and other in side


def perturb(
    weights: Arrays, seed: int, parameters: set[str], dtype: str = "float64"
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields tensors with noise on parameters and running statistics: gains of one and biases of
    zero hide bugs.

    Other buffers are constants, such as a table of positions, of which a port has its own.
    """
    generator = np.random.default_rng(seed)
    for name, held in weights.items():
        if name not in parameters and not is_statistic(name, weights):
            yield name, held
            continue
        x = np.asarray(held, np.float64)
        spread = 0.1 * x.std() if x.size and x.std() > 0 else SPREAD
        z = generator.standard_normal(x.shape)
        moved = x * np.exp(SPREAD * z) if (x > 0).all() else x + spread * z
        yield name, moved.astype(dtype)


class NudgedWeights(Mapping[str, np.ndarray]):
    """Weights, each moved by one ulp of a dtype, up or down by a coin, when it is asked for."""

    def __init__(self, weights: Arrays, seed: int, dtype: str) -> None:
        self.weights, self.seed, self.ulp = weights, seed, ULPS[dtype]
        self.order = {name: at for at, name in enumerate(weights)}

    def __getitem__(self, name: str) -> np.ndarray:
        x = self.weights[name]
        generator = np.random.default_rng([self.seed, 1, self.order[name]])
        coins = generator.integers(0, 2, x.shape, np.int8) * np.int8(2) - np.int8(1)
        size = np.where(np.isfinite(x), np.abs(x), 0)  # a mask may have infinite values
        return x + size * self.ulp * coins

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


def spread_of_sum(n: int, dtype: str) -> float:
    """How far another order of adding moves a sum of n terms of a dtype, relative to their 2-norm.

    Each partial sum is rounded by at most half an ulp; of a format below float32 it is in float32.
    Of terms of either sign the k-th is sqrt(k) terms large, so that all n roundings, of either
    sign, add up to sqrt(n) half ulps of the norm.
    """
    return n**0.5 * ULPS["float64" if "float64" in dtype else "float32"] / 2


def is_short(x: np.ndarray) -> bool:
    """Says if all are short fractions, such as a mask's: float32 has them as float64 does."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.array_equal(x * 1024, np.round(x * 1024), equal_nan=True)


def is_of_float32(x: np.ndarray) -> bool:
    """Says if all values are those of float32, though some are no short fractions."""
    with np.errstate(over="ignore"):
        return np.array_equal(np.float32(x), x) and not is_short(x)


def relative_gaps(a: np.ndarray, b: np.ndarray, order: float = 2) -> np.ndarray:
    """(..., K), (..., K) -> (K,): |a - b| over the larger norm of the two; 0 for two zeros."""
    a, b = (np.asarray(x, np.float64).reshape(-1, x.shape[-1]) for x in (a, b))
    gap = np.linalg.norm(a - b, order, axis=0)
    size = np.maximum(*(np.linalg.norm(x, order, axis=0) for x in (a, b)))
    return np.divide(gap, size, out=gap, where=gap != 0)


def largest_gaps(plain: Arrays, runs: Iterable[Arrays]) -> dict[str, float]:
    """By array: the largest gap of some runs to the plain one, in 2-norm or maximum norm."""
    found: dict[str, float] = {}
    for run in runs:
        for name, x in run.items():
            a, b = x.reshape(-1, 1), plain[name].reshape(-1, 1)
            gaps = [float(relative_gaps(a, b, order)[0]) for order in (2, np.inf) if a.size]
            found[name] = max([found.get(name, 0.0), *gaps])
    return found


def narrowest_of(formats: Iterable[str]) -> str:
    """Chooses among the formats of a program's values; float32 where none is known."""
    return max((name for name in formats if name in ULPS), key=ULPS.__getitem__, default="float32")
