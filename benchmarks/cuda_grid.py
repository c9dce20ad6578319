"""`python -m benchmarks.cuda_grid`: JAX beside PyTorch over policies and remat, without a GPU.

GPT-2, 8 sequences a step, as compiled (JAX) and traced (PyTorch) for an H100 and a T4: peak memory,
bytes moved, and what breaks a rule. Adds a row for each cell that has none, and prints a table;
half an hour of one core. Needs the extra [aot].
"""

import sys
from contextlib import closing
from typing import Any

from benchmarks import tables
from lockstep import results, twin
from lockstep.compile import rules, targets
from lockstep.compile.ask import Compiler
from lockstep.config import from_flags
from lockstep.exits import DONE, FAILED, exit_status
from lockstep.flags import Parser
from lockstep.parity.matrix import FACTORS
from lockstep.process import ROOT

FILE = ROOT / "benchmarks" / "results" / "cuda_grid.jsonl"
POLICIES = {"h100": ("bf16", "fp16", "fp32", "tf32"), "t4": ("fp16", "fp32")}
HEAD = ["device, policy, remat", "peak in GB, JAX", "PyTorch", "JAX over PyTorch",
        "moved in GB, JAX", "PyTorch"]  # fmt: skip


def names() -> dict[str, tuple[str, str, str]]:
    """Name of a row -> its device, policy and remat mode."""
    each = ((d, p, r) for d, found in POLICIES.items() for p in found for r in FACTORS["remat"])
    return {", ".join(cell): cell for cell in each}


def measure(cell: tuple[str, str, str], compilers: dict[str, Compiler]) -> dict[str, Any]:
    """Peak and bytes moved by framework, and every rule that a program breaks."""
    device, policy, remat = cell
    flags = {"model": "gpt2", "policy": policy, "remat": remat, "batch_size": 8}
    config, target = from_flags(flags, accelerator=True), targets.find(device)
    found = {name: compiler.program(config, device) for name, compiler in compilers.items()}
    wrong = [
        f"{name}: {line}"
        for name, program in found.items()
        for line in rules.violations(program, config, target)
    ]
    peaks, moved = ({n: getattr(p, what) for n, p in found.items()} for what in ("peak", "moved"))
    return {"peak": peaks, "moved": moved, "wrong": wrong}


def markdown(stored: dict[str, results.Row]) -> str:
    rows = []
    for name, row in stored.items():
        peak, moved = ([row[what][f] / 1e9 for f in twin.MODULES] for what in ("peak", "moved"))
        figures = f"{peak[0]:.2f}", f"{peak[1]:.2f}", f"{peak[0] / peak[1]:.2f}"
        rows.append([name, *figures, *(f"{each:.1f}" for each in moved)])
    return tables.markdown(HEAD, rows)


def main(argv: list[str] | None = None) -> int:
    """The command line; status 1 if a program breaks a rule."""
    Parser(prog="python -m benchmarks.cuda_grid", description=__doc__).parse_args(argv)
    known = results.read(FILE)
    with closing(Compiler("jax")) as jax, closing(Compiler("torch")) as torch:
        compilers = dict(zip(twin.MODULES, (jax, torch), strict=True))
        for name, cell in names().items():
            if name not in known:
                results.put(FILE, [results.row(name, cell[0], **measure(cell, compilers))])
    stored = results.read(FILE)
    wrong = [f"{name}, {line}" for name, row in stored.items() for line in row["wrong"]]
    print(markdown(stored), *wrong, sep="\n")
    return FAILED if wrong else DONE


if __name__ == "__main__":
    sys.exit(exit_status(main))
