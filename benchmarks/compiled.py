"""`python -m benchmarks.compiled jax|torch|mesh [TEXT]`: asks for the programs that `lockstep plan`
is held to, as `lockstep compile` does.

Those of one device of JAX and torch are the rows that are there; those of meshes are listed and
drawn here. `TEXT` chooses by name; without it those are asked that have no row yet. A row is
written as soon as its program is known.
"""

import sys
import time
from itertools import product
from typing import Any

import numpy as np

from benchmarks.cells import Flags
from lockstep import results, twin
from lockstep.compile import report, targets
from lockstep.compile.ask import Compiler
from lockstep.compile.program import Program
from lockstep.config import from_flags
from lockstep.errors import require
from lockstep.exits import DONE, exit_status
from lockstep.flags import Parser
from lockstep.plan.recommend import REMAT
from lockstep.process import ROOT

FOLDER = ROOT / "benchmarks" / "results"
DEVICE = "h100"
FILES = (*twin.MODULES, "mesh")
DRAWS = {"torch": 4, "jax": 1}  # of a model and a remat mode; a trace takes seconds, XLA a minute
MESHES = ("fsdp=8", "fsdp=2", "data=2,fsdp=4", "fsdp=4", "fsdp=64", "data=4")
POLICIES = ("bf16", "fp32", "bf16", "fp16")
WIDTHS = ((512, 8), (768, 12), (1024, 16), (1536, 12), (2048, 16))  # D and H
LARGE: Flags = {"model": "1b", "n_layer": 32, "n_head": 32, "d_model": 4096}


def on_meshes(framework: str) -> dict[str, Flags]:
    """Name -> cell of each program of one framework."""
    found = {" ".join(map(str, cell.values())): cell for cell in listed(framework)}
    random = np.random.Generator(np.random.Philox(73))
    for number, (draw, model, remat) in enumerate(
        product(range(DRAWS[framework]), ("gpt2", "125m", "1b"), REMAT)
    ):
        width, heads = WIDTHS[random.integers(len(WIDTHS))]
        layers, context, vocab, rows = (
            int(random.choice(x))
            for x in ((4, 6, 8, 12, 16), (512, 1024, 2048), (8192, 50304, 128256),
                      (1, 2, 3, 4, 6, 8, 12, 16))
        )  # fmt: skip
        found[f"{model} {remat} drawn {draw}"] = {
            "model": model, "mesh": MESHES[number % len(MESHES)], "remat": remat,
            "policy": POLICIES[draw % len(POLICIES)], "accum": 1 + (draw == 2), "n_layer": layers,
            "n_head": heads, "d_model": width, "context": context, "vocab": vocab,
            "batch_size": rows,
        }  # fmt: skip
    if framework == "jax":  # as the recommended command runs them
        layers_of = {True: "unroll", False: "scan"}
        found = {name: cell | {"layers": layers_of[cell["remat"] == "none"]}
                 for name, cell in found.items()}  # fmt: skip
    return {f"{framework} {name}": cell for name, cell in found.items()}


def listed(framework: str) -> list[Flags]:
    """Batch sizes, modes and meshes of whole models, as they are trained."""
    given: Flags = {"model": "1b", "mesh": "fsdp=8", "remat": "block", "policy": "bf16"}
    found = [given | {"batch_size": rows} for rows in (1, 2, 3, 4, 8, 16)]
    if framework == "jax":
        return [cell for cell in found if cell["batch_size"] in (1, 4, 16)]
    found += [given | {"remat": remat, "batch_size": rows}
              for remat in ("none", "sublayer", "sqrt", "dots") for rows in (1, 8)]  # fmt: skip
    found += [given | {"mesh": mesh, "batch_size": 1}
              for mesh in ("fsdp=2", "fsdp=4", "data=8,fsdp=128", "data=8")]  # fmt: skip
    found += [given | {"policy": "fp32", "batch_size": rows, "accum": n}
              for rows, n in ((1, 1), (8, 1), (2, 4))]  # fmt: skip
    seven = given | LARGE | {"vocab": 50304, "context": 2048}
    found += [seven | {"batch_size": rows} for rows in (1, 2, 6, 8, 16)]
    found += [seven | {"remat": "none", "batch_size": 6}]
    found += [seven | {"remat": "sqrt", "batch_size": 16}, seven | {"batch_size": 2, "accum": 4}]
    eight = given | LARGE | {"vocab": 128256, "context": 8192, "batch_size": 1}
    return found + [eight | {"remat": remat} for remat in REMAT]


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
    parser.add_argument("text", metavar="TEXT", nargs="?", help="a part of a name (default: new)")
    given = parser.parse_args(argv)
    path = FOLDER / f"compiled-{given.file}.jsonl"
    rows = results.read(path)
    cells = {name: (row["cell"], row["measured"]["device"]) for name, row in rows.items()}
    if given.file == "mesh":
        cells |= {name: (cell, DEVICE) for each in twin.MODULES
                  for name, cell in on_meshes(each).items()}  # fmt: skip
    asked = [name for name in cells if (given.text in name if given.text else name not in rows)]
    require(bool(asked), "TEXT", given.text, "no name has it, or all have rows")
    compilers: dict[str, Compiler] = {}
    for number, name in enumerate(asked):
        cell, device = cells[name]
        framework = name.split()[0] if given.file == "mesh" else given.file
        compiler = compilers.get(framework) or compilers.setdefault(framework, Compiler(framework))
        began = time.perf_counter()
        program = compiler.program(from_flags({**cell, "steps": 1}, accelerator=True), device)
        seconds = round(time.perf_counter() - began, 2)
        row = results.row(name, device, seconds, cell=cell, **figures(program, device))
        results.put(path, [row])
        print(f"[{number + 1}/{len(asked)}] {name}: {program.peak / 1e9:.2f} GB", flush=True)
    for compiler in compilers.values():
        compiler.close()
    return DONE


if __name__ == "__main__":
    sys.exit(exit_status(main))
