"""`python -m benchmarks.startup`: CPU time until a command does its work, and the imports in it.

A trainer ends with its first step, after the first evaluation. Each command runs some times, after
once for its caches. The imports are those that `python -X importtime` lists, by package, in a run
of their own, which they slow down.
"""

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from typing import Any

from benchmarks import tables
from benchmarks.process import say
from lockstep import results
from lockstep.cli import trainers
from lockstep.errors import require_range
from lockstep.exits import exit_status
from lockstep.flags import Parser, reader
from lockstep.process import ROOT, start_module
from lockstep.results import Row
from lockstep.train.loop import Loop

FILE = ROOT / "benchmarks" / "results" / "startup.jsonl"
FIRST_STEP = ["benchmarks.startup", "--first-step"]
COMMANDS = {  # name: words, the most CPU seconds
    "lockstep --help": (["lockstep", "--help"], 0.2),
    "python -m torch_ref.train": ([*FIRST_STEP, "torch"], 3.0),
    "python -m jax_impl.train": ([*FIRST_STEP, "jax"], 4.0),
}
SHOWN = 5  # packages of a command
IMPORT = re.compile(r"^import time:\s+(\d+) \|\s+\d+ \|\s+([^.\s]+)", re.M)


def measure(words: list[str], turns: int) -> dict[str, Any]:
    seconds = [cpu_seconds(words)[0] for _ in range(turns + 1)][1:]
    _, imports = cpu_seconds(words, PYTHONPROFILEIMPORTTIME="1")
    return {"cpu_seconds": seconds, "imports": imports}


def cpu_seconds(words: list[str], **changes: str) -> tuple[float, dict[str, float]]:
    """Of one process, with its imports' seconds where the environment asks for them."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
        child = start_module(
            *words, changes=changes, cwd=folder, stdout=subprocess.DEVNULL, stderr=errors
        )
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        errors.seek(0)
        text = errors.read()
    if child.returncode:
        raise RuntimeError(f"{words}: status {child.returncode}: {text[-2000:]}")
    return used.ru_utime + used.ru_stime, by_package(text)


def by_package(text: str) -> dict[str, float]:
    """Seconds of the packages that take longest, each module's own; of what importtime printed."""
    found: Counter[str] = Counter()
    for microseconds, package in IMPORT.findall(text):
        found[package] += int(microseconds)
    return {package: total / 1e6 for package, total in found.most_common(SHOWN)}


def train_one_step(framework: str) -> int:
    """A trainer's `main` in this process, which ends with its first step."""

    def end(self: Loop, result: Any) -> None:
        os._exit(0)

    Loop.report = end  # type: ignore[method-assign]
    return trainers.train(framework, ["--model", "tiny"])


def markdown(rows: dict[str, Row]) -> str:
    lines = []
    for name, row in rows.items():
        seconds, (_, most) = row["cpu_seconds"], COMMANDS[name]
        imports = ", ".join(f"{each} {took:.2f}" for each, took in row["imports"].items())
        lines.append([f"`{name}`", f"{min(seconds):.2f}", f"{statistics.median(seconds):.2f}",
                      f"{most:g}", imports])  # fmt: skip
    return tables.markdown(["command", "CPU-s, least", "median", "at most", "imports, s"], lines)


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = Parser(prog="python -m benchmarks.startup", description=__doc__)
    parser.add_argument("--turns", metavar="N", type=reader(int), default=5,
                        help="runs of each command (default: 5)")  # fmt: skip
    turns = parser.parse_args(argv).turns
    require_range("--turns", turns, 1)
    for name, (words, _) in COMMANDS.items():
        began = time.perf_counter()
        found = measure(words, turns)
        results.put(FILE, [results.row(name, "cpu", time.perf_counter() - began, **found)])
        say(f"{name}: {min(found['cpu_seconds']):.2f} CPU-s")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == FIRST_STEP[1:]:
        sys.exit(train_one_step(sys.argv[2]))
    sys.exit(exit_status(main))
