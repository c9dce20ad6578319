"""`python -m benchmarks.resident`: the resident peak of a step on a CPU, beside the step's account.

Each row is measured twice, each time in a new process: with every block of 64 KiB or more mapped by
itself, so that what is freed is given back at once, and as malloc comes. What the first peak has
over the account, the libraries hold; what the second has over the first, malloc keeps.

A FRAMEWORK alone is measured in this process: as malloc comes or, with --keep, as the JAX trainer.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.cells import Flags
from lockstep import twin
from lockstep.config import from_flags
from lockstep.config.fields import flag_name
from lockstep.errors import UserError, require, require_range
from lockstep.exits import DONE, exit_status
from lockstep.flags import Parser, reader
from lockstep.parity.pair import GPT
from lockstep.parity.toy import start
from lockstep.process import NO_CHANGE, run_module
from lockstep.train.memory import ResidentGrowth, keep_freed_memory

GPT2 = {"model": "gpt2", "n_layer": 6, "n_head": 6, "d_model": 384, "vocab": 256, "context": 256,
        "warmup": 1, "device": "cpu"}  # fmt: skip
ROW = {"policy": "fp32", "batch_size": 4}
MAPPED = {"MALLOC_MMAP_THRESHOLD_": "65536"}


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = Parser(prog="python -m benchmarks.resident", description=__doc__)
    parser.add_argument("framework", nargs="?", metavar="FRAMEWORK", help="of one row, as JSON")
    parser.add_argument("--policy", help=f"of FRAMEWORK (default: {ROW['policy']})")
    parser.add_argument("--batch-size", type=reader(int), metavar="B",
                        help=f"of FRAMEWORK (default: {ROW['batch_size']})")  # fmt: skip
    parser.add_argument("--steps", type=reader(int), default=4, metavar="N",
                        help="(default: %(default)s)")  # fmt: skip
    parser.add_argument("--keep", action="store_true", default=None,
                        help="of FRAMEWORK: keep freed memory (default: off)")  # fmt: skip
    given = parser.parse_args(argv)
    require_range("--steps", given.steps, 2)
    alone = given.framework is not None
    for name in (*ROW, "keep"):
        unasked = getattr(given, name) is None
        require(alone or unasked, flag_name(name), "without FRAMEWORK", "name jax or torch")
    if given.keep:
        keep_freed_memory()
    if alone:
        require(given.framework in twin.MODULES, "FRAMEWORK", given.framework, "use jax or torch")
        row = {name: value for name in ROW if (value := getattr(given, name)) is not None}
        print(json.dumps(measure(given.framework, given.steps, {**ROW, **row})))
        return DONE
    print("| framework | policy | batch size | account, MiB | peak, blocks mapped | peak |")
    print("| --- | --- | --- | --- | --- | --- |")
    for framework in twin.MODULES:
        for policy in ("fp32", "bf16"):
            for rows in (4, 16):
                words = (framework, "--policy", policy, "--batch-size", str(rows), "--steps",
                         str(given.steps))  # fmt: skip
                found = [ask(words, MAPPED), ask(words, NO_CHANGE)]
                cells = [found[0]["account"], *(each["peak"] for each in found)]
                print(f"| {framework} | {policy} | {rows} |",
                      " | ".join(f"{n / 2**20:.0f}" for n in cells), "|", flush=True)  # fmt: skip
    return DONE


def ask(words: tuple[str, ...], changes: Mapping[str, str]) -> dict[str, Any]:
    """A row of its own process, in another environment."""
    told = run_module("benchmarks.resident", *words, changes=changes, stdout=subprocess.PIPE)
    if told.returncode:
        raise UserError(f"{' '.join(words)}: its process ended; see above")
    found: dict[str, Any] = json.loads(told.stdout)
    return found


def measure(framework: str, steps: int, row: Flags) -> dict[str, Any]:
    """Bytes: how far the resident set grows over some steps, and the twin's account of one. The
    seconds of the median step."""
    config = from_flags({**GPT2, **row, "steps": steps + 1}, accelerator=False)
    built = start(framework, config)
    built.prepare()
    growth, seconds = ResidentGrowth(), []
    for step in range(steps):
        began = time.perf_counter()
        built.step(built.place(GPT.window(config, step)))()
        seconds.append(time.perf_counter() - began)
    peak = growth.bytes()
    if peak is None:
        raise UserError("resident memory: this system cannot forget a former peak; use Linux")
    account = built.step_bytes(GPT.window(config, 0))
    return {"peak": peak, "account": account, "seconds": statistics.median(seconds)}


if __name__ == "__main__":
    sys.exit(exit_status(main))
