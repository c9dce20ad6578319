"""`python -m benchmarks.compiled jax|torch|mesh TEXT`: compiles again the programs with TEXT in
their names that `lockstep plan` is held to, as `lockstep compile` does.

A program is listed by its row, which is written as soon as the program is known.
"""

import sys
import time
from contextlib import closing
from typing import Any

from lockstep import results, twin
from lockstep.compile import report, targets
from lockstep.compile.ask import Compiler
from lockstep.compile.program import Program
from lockstep.config import from_flags
from lockstep.errors import require
from lockstep.exits import DONE, exit_status
from lockstep.flags import Parser
from lockstep.process import ROOT

FILES = (*twin.MODULES, "mesh")


def figures(program: Program, device: str) -> dict[str, Any]:
    """Returns the figures that the plan is held to."""
    moved = program.moved_by_group()
    return {
        "peak": program.peak, "parts": program.parts, "flops": program.flops, "moved": moved,
        "kernels": sum(kernel.times for kernel in program.kernels),
        "roofline": report.roofline(program, targets.find(device)),
        "attention": program.attention_asked,
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = Parser(prog="python -m benchmarks.compiled", description=__doc__)
    parser.add_argument("file", metavar="FILE", choices=FILES, help=", ".join(FILES))
    parser.add_argument("text", metavar="TEXT", help="a part of a name")
    given = parser.parse_args(argv)
    path = ROOT / "benchmarks" / "results" / f"compiled-{given.file}.jsonl"
    asked = {name: row for name, row in results.read(path).items() if given.text in name}
    require(bool(asked), "TEXT", given.text, "no name has it")
    for number, (name, row) in enumerate(asked.items()):
        cell, device = row["cell"], row["measured"]["device"]
        began = time.perf_counter()
        with closing(Compiler(name.split()[0] if given.file == "mesh" else given.file)) as compiler:
            program = compiler.program(from_flags({**cell, "steps": 1}, accelerator=True), device)
        seconds = round(time.perf_counter() - began, 2)
        results.put(path, [results.row(name, device, seconds, cell=cell,
                                       **figures(program, device))])  # fmt: skip
        print(f"[{number + 1}/{len(asked)}] {name}: {program.peak / 1e9:.2f} GB", flush=True)
    return DONE


if __name__ == "__main__":
    sys.exit(exit_status(main))
