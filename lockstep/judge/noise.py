"""Measures the noise of a correct program: its gap to itself after tiny changes.

Two correct programs round differently. By how much can be measured in one of them: move every
weight by one ulp of float32, or permute the rows of each batch, and run it again. Whatever the
machine, its kernels and their orders of summation, the gap of two programs is held against that.
The larger noise of the two counts: which of them comes first changes no verdict.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from lockstep.data.batch import Batch, stack_batches
from lockstep.judge.tolerances import epsilon
from lockstep.model.params import Arrays
from lockstep.model.state import TrainState
from lockstep_recorder.noise import relative_gaps

Measure = Callable[[TrainState], Arrays]  # what a program computes from a state
TENSOR_RUNS = 3
DISTURBANCE = 0.02  # of every weight


@dataclass(frozen=True, kw_only=True)
class Perturbation:
    """A change of a program's input, by seeds; a seed of None changes nothing."""

    weights: int | None = None
    rows: int | None = None
    dtype: str = "float32"  # whose rounding moves the weights
    rounded: bool = True  # to the dtype's numbers; or only as far

    def state(self, state: TrainState) -> TrainState:
        if self.weights is None:
            return state
        nudged = nudge_weights(state.params, self.weights, self.dtype, rounded=self.rounded)
        return replace(state, params=nudged)

    def windows(self, windows: Batch) -> Batch:
        """Permutes the rows of windows (S, N, B, T), if there is a seed for rows."""
        if self.rows is None:
            return windows
        return stack_batches([permute_rows(window, self.rows) for window in windows.split()])


PLAIN = Perturbation()


def nudge_weights(
    weights: Arrays, seed: int, dtype: str = "float32", *, rounded: bool = True
) -> Arrays:
    """Moves every float32 weight by one ulp, randomly up or down.

    With a half-precision `dtype`, or "tf32": rounded to it, up or down at random, the nearer the
    likelier.
    """
    generator = np.random.Generator(np.random.Philox(key=[seed, 1]))

    def nudge(w: np.ndarray) -> np.ndarray:
        coin = generator.random(w.shape)
        if dtype == "float32":
            return np.nextafter(w, np.where(coin < 0.5, -np.inf, np.inf), dtype=np.float32)
        ulp = np.spacing(np.abs(w)) * np.float32(epsilon(dtype) / epsilon("float32"))
        moved = w + (coin - 0.5) * ulp
        return round_to(moved, dtype) if rounded else moved.astype(np.float32)

    return {name: nudge(w) for name, w in weights.items()}


def round_to(x: np.ndarray, dtype: str) -> np.ndarray:
    """Rounds float32 numbers to a narrower dtype, or to TF32; returns float32."""
    if dtype == "tf32":  # 13 of float32's 23 bits go
        bits = x.astype(np.float32).view(np.int32)
        return ((bits + (1 << 12)) >> 13 << 13).view(np.float32)
    return x.astype(dtype).astype(np.float32)


def disturb(weights: Arrays, generator: np.random.Generator) -> Arrays:
    """Adds noise far above rounding to weights: gains of one and biases of zero hide bugs."""
    return {
        name: weight + generator.normal(0, DISTURBANCE, weight.shape).astype(np.float32)
        for name, weight in weights.items()
    }


def permute_rows(window: Batch, seed: int) -> Batch:
    """Permutes the rows of each micro-batch of (N, B, T)."""
    generator, rows = np.random.Generator(np.random.Philox(key=[seed, 2])), window.tokens.shape[1]
    return stack_batches([batch.select(generator.permutation(rows)) for batch in window.split()])


def tensor_noise(measure: Measure, state: TrainState, dtype: str = "float32") -> Arrays:
    """Measures a program's largest relative gap to its nudged self: by tensor and batch, (K,)."""
    plain = measure(state)
    runs = [
        measure(Perturbation(weights=seed, dtype=dtype).state(state)) for seed in range(TENSOR_RUNS)
    ]
    return {
        name: np.max([relative_gaps(run[name], x) for run in runs], axis=0)
        for name, x in plain.items()
    }
