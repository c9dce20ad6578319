"""What an arm does: `python -m benchmarks.experiments.work ARM RESULT.json`, ARM as JSON."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks import process
from benchmarks.experiments import flushing, injection, sums, updates
from benchmarks.experiments.arm import Arm
from benchmarks.experiments.held_out import held_out
from benchmarks.measure import Result, guarded, measure, state_bytes, tokens_per_step, write
from benchmarks.process import made, words
from lockstep.config import Config
from lockstep.exits import exit_status
from lockstep.twin import Twin


def train(arm: Arm) -> Result:
    """A run from the seed's weights, timed, with its curve and the held-out loss at its end."""
    return measure(arm.cell, afterwards)


def afterwards(twin: Twin, config: Config) -> Result:
    return {
        "validation_loss": held_out(twin, config), "state_bytes": state_bytes(config),
        "tokens_per_step": tokens_per_step(config),
    }  # fmt: skip


WORKS: dict[str, Callable[[Arm], Result]] = {
    "train": train, "flushed": flushing.flushed, "injected": injection.injected,
    "updates": updates.updates, "sums": sums.sums,
}  # fmt: skip


def main(given: str, out: str) -> int:
    arm = made(Arm, process.given(given))
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    write(Path(out), {**vars(arm), **guarded(lambda: WORKS[arm.work](arm))})
    return 0


def command(argv: list[str] | None = None) -> int:
    """The command line."""
    return exit_status(lambda: main(*words(argv, "benchmarks.experiments.work", "ARM", "RESULT")))


if __name__ == "__main__":
    sys.exit(command())
