"""`python -m benchmarks.resident`: the resident peak of a step on a CPU, beside the step's account.

Each row is measured twice, each time in a new process: as malloc comes, and with every block of
64 KiB or more mapped by itself, so that what is freed is given back at once. What the second peak
has over the account, the libraries hold; what the first has over the second, malloc keeps.
"""

import json
import subprocess
import sys

from lockstep import twin
from lockstep.config import from_flags
from lockstep.errors import UserError, require
from lockstep.exits import DONE, exit_status
from lockstep.flags import Parser, reader
from lockstep.parity.pair import GPT
from lockstep.parity.toy import start
from lockstep.process import run_module
from lockstep.train.memory import ResidentGrowth

GPT2 = {"model": "gpt2", "n_layer": 6, "n_head": 6, "d_model": 384, "vocab": 256, "context": 256,
        "steps": 6, "warmup": 1, "device": "cpu"}  # fmt: skip
MAPPED = {"MALLOC_MMAP_THRESHOLD_": "65536"}
STEPS = 4


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = Parser(prog="python -m benchmarks.resident", description=__doc__)
    parser.add_argument("framework", nargs="?", metavar="FRAMEWORK", help="of one row, as JSON")
    parser.add_argument("--policy", default="fp32", help="(default: %(default)s)")
    parser.add_argument("--batch-size", type=reader(int), default=4, metavar="B",
                        help="(default: %(default)s)")  # fmt: skip
    given = parser.parse_args(argv)
    if given.framework:
        require(given.framework in twin.MODULES, "FRAMEWORK", given.framework, "use jax or torch")
        print(json.dumps(measure(given.framework, given.policy, given.batch_size)))
        return DONE
    print("| framework | policy | batch size | account, MiB | peak, blocks mapped | peak |")
    print("| --- | --- | --- | --- | --- | --- |")
    for framework in twin.MODULES:
        for policy in ("fp32", "bf16"):
            for rows in (4, 16):
                found = [ask(framework, policy, rows, changes) for changes in (MAPPED, {})]
                cells = [found[0]["account"], *(each["peak"] for each in found)]
                print(f"| {framework} | {policy} | {rows} |",
                      " | ".join(f"{n / 2**20:.0f}" for n in cells), "|", flush=True)  # fmt: skip
    return DONE


def ask(framework: str, policy: str, rows: int, changes: dict[str, str]) -> dict[str, int]:
    """`measure` in a process of its own."""
    words = (framework, "--policy", policy, "--batch-size", str(rows))
    told = run_module("benchmarks.resident", *words, changes=changes, stdout=subprocess.PIPE)
    if told.returncode:
        raise UserError(f"{framework} in {policy}: its process ended; see above")
    found: dict[str, int] = json.loads(told.stdout)
    return found


def measure(framework: str, policy: str, rows: int) -> dict[str, int]:
    """Bytes: how far the resident set grows over some steps, and the twin's account of one."""
    flags = {**GPT2, "policy": policy, "batch_size": rows}
    config = from_flags(flags, accelerator=False)
    built = start(framework, config)
    built.prepare()
    growth = ResidentGrowth()
    for step in range(STEPS):
        built.step(built.place(GPT.window(config, step)))()
    peak = growth.bytes()
    if peak is None:
        raise UserError("resident memory: this system cannot forget a former peak; use Linux")
    return {"peak": peak, "account": built.step_bytes(GPT.window(config, 0))}


if __name__ == "__main__":
    sys.exit(exit_status(main))
