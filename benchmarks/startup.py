"""CPU time until a command does its work.

A trainer ends with its first step, after the first evaluation. Each command runs some times, after
once for its caches.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks import tables
from lockstep.cli import trainers
from lockstep.process import start_module
from lockstep.results import Row
from lockstep.train.loop import Loop

COMMANDS = {  # name: words, the most CPU seconds
    "lockstep --help": (["lockstep", "--help"], 0.2),
    "python -m torch_ref.train": (["benchmarks.startup", "torch"], 3.0),
    "python -m jax_impl.train": (["benchmarks.startup", "jax"], 4.0),
}
TURNS = 5


def measure(command: str) -> dict[str, Any]:
    words, _ = COMMANDS[command]
    return {"cpu_seconds": [cpu_seconds(words) for _ in range(TURNS + 1)][1:]}


def cpu_seconds(words: list[str]) -> float:
    """The CPU time of one process."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
        child = start_module(*words, cwd=folder, stdout=subprocess.DEVNULL, stderr=errors)
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        errors.seek(0)
        text = errors.read()
    if child.returncode:
        raise RuntimeError(f"{words}: status {child.returncode}: {text[-2000:]}")
    return used.ru_utime + used.ru_stime


def train_one_step(framework: str) -> int:
    """A trainer's `main` in this process, which ends with its first step."""

    def end(self: Loop, result: Any) -> None:
        os._exit(0)

    Loop.report = end  # type: ignore[method-assign]
    return trainers.train(framework, ["--model", "tiny"])


def markdown(rows: dict[str, Row]) -> str:
    return tables.markdown(["command", "CPU-s, least", "median", "at most"], [
        [f"`{name}`", f"{min(row['cpu_seconds']):.2f}",
         f"{statistics.median(row['cpu_seconds']):.2f}", f"{COMMANDS[name][1]:g}"]
        for name, row in rows.items()
    ])  # fmt: skip


if __name__ == "__main__":
    sys.exit(train_one_step(sys.argv[1]))
