"""A twin of numpy alone, so that what the loop does shows in milliseconds and without a framework.

`python -m parity_tests.fake FLAGS` is its trainer; FAKE_PREPARE and FAKE_STEP are the seconds that
compilation and a step seem to take.
"""

import os
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from lockstep import twin
from lockstep.cli import trainers
from lockstep.config import Config
from lockstep.data.batch import Batch
from lockstep.model.params import Arrays
from lockstep.model.state import TrainState
from lockstep.twin import BatchTrace, StepResult

PRIME = 65_521


class FakeTwin:
    """`lockstep.twin.Twin`; its weights depend on each step taken and on each window, for ever."""

    framework = "fake"
    synchronous = False
    rank = 0

    def __init__(self, config: Config) -> None:
        self.config = config

    def broadcast(self, number: int) -> int:
        return number

    def any_rank(self, flag: bool) -> bool:
        return flag

    def local_rows(self, count: int) -> None:
        return None

    def describe(self) -> dict[str, Any]:
        return {"device": "none", "platform": "cpu", "attention": "none", "versions": {}}

    def load(self, state: TrainState) -> None:
        self.now = state

    def state(self) -> TrainState:
        return self.now

    def prepare(self, window: Batch | None = None) -> None:
        pass

    def place(self, window: Batch) -> Batch:
        return window

    def step(self, window: Batch) -> Callable[[], StepResult]:
        step = self.now.step + 1
        weights = {name: move(w, step, window) for name, w in self.now.params.items()}
        self.now = replace(self.now, params=weights, step=step, updates=step)
        return lambda: self.result(step)

    def result(self, step: int) -> StepResult:
        return StepResult(1 / step, 1.0, 1e-3, self.now.loss_scale, False)

    def loss_and_grads(self, batch: Batch) -> tuple[float, Arrays]:
        raise NotImplementedError

    def evaluate(self, batches: Batch) -> float:
        return 1 / (1 + self.now.step)

    def trace(self, batch: Batch) -> BatchTrace:
        raise NotImplementedError

    def step_bytes(self, window: Batch) -> int:
        raise NotImplementedError

    def step_flops(self, window: Batch) -> int:
        raise NotImplementedError

    def recomputed(self) -> None:
        return None

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        return np.zeros(self.config.model.vocab)

    def peak_bytes(self) -> int:
        return 0


def move(weight: np.ndarray, step: int, window: Batch) -> np.ndarray:
    """Takes a step from a weight. Times 3 modulo a prime, no difference ever fades."""
    drawn = zlib.crc32(np.ascontiguousarray(window.tokens).tobytes(), step) % PRIME
    return (3 * weight + np.float32(drawn)) % np.float32(PRIME)


class SlowTwin(FakeTwin):
    """A `FakeTwin` that pauses."""

    def prepare(self, window: Batch | None = None) -> None:
        if seconds := float(os.environ.get("FAKE_PREPARE", 0)):
            print("preparing", file=sys.stderr, flush=True)
            time.sleep(seconds)

    def step(self, window: Batch) -> Callable[[], StepResult]:
        time.sleep(float(os.environ.get("FAKE_STEP", 0.02)))
        return super().step(window)


def build(config: Config) -> FakeTwin:
    return SlowTwin(config) if __name__ == "__main__" else FakeTwin(config)


def device_count(device: str) -> int:
    return 1


def end(status: int) -> None:
    pass


def has_accelerator(device: str) -> bool:
    return False


if __name__ == "__main__":
    twin.MODULES["fake"] = "__main__"
    sys.exit(trainers.train("fake"))
