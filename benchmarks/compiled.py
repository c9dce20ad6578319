"""Programs for devices that are not here, as `lockstep compile` makes them; needs the extra [aot].

`cuda-grid`: JAX beside PyTorch over policies and remat, half an hour of one core. `compiled-jax`,
`compiled-torch` and `compiled-mesh`: the programs that `lockstep plan` is held to, by their rows.
"""

from contextlib import closing
from typing import Any

from benchmarks import programs
from benchmarks.cells import PLAIN, Flags
from benchmarks.jobs import Job
from benchmarks.tables import markdown
from lockstep import results, twin
from lockstep.compile import report, rules, targets
from lockstep.compile.ask import Compiler
from lockstep.compile.program import Program
from lockstep.config import Config, from_flags
from lockstep.parity.matrix import FACTORS

POLICIES = {"h100": ("bf16", "fp16", "fp32", "tf32"), "t4": ("fp16", "fp32")}
GRID = [(d, p, r) for d, found in POLICIES.items() for p in found for r in FACTORS["remat"]]
LIBRARY = "matmuls by a library"  # so many of JAX's, if any; torch's all are
GRID_HEAD = ["device, policy, remat", "peak in GB, JAX", "PyTorch", "JAX over PyTorch",
             "moved in GB, JAX", "PyTorch"]  # fmt: skip


def grid_jobs(device: str) -> list[Job]:
    return [
        Job(name=", ".join(cell), work="benchmarks.compiled:measure_grid", device=cell[0],
            given=dict(zip(("device", "policy", "remat"), cell)))
        for cell in GRID
    ]  # fmt: skip


def known_jobs(file: str, device: str) -> list[Job]:
    """The programs of a file's rows, compiled again: `--only TEXT` chooses.

    Args:
        file: jax, torch or mesh.
    """
    return [
        Job(name=name, work="benchmarks.compiled:measure_known", device=row["measured"]["device"],
            given={"framework": name.split()[0] if file == "mesh" else file, "cell": row["cell"],
                   "gpu": row["measured"]["device"]})
        for name, row in programs.rows_of(file).items()
    ]  # fmt: skip


def make(framework: str, config: Config, device: str) -> Program:
    with closing(Compiler(framework)) as compiler:
        return compiler.program(config, device)


def figures(program: Program) -> dict[str, Any]:
    """Returns the figures that the plan is held to."""
    return {
        "peak": program.peak, "parts": program.parts, "flops": program.flops,
        "moved": program.moved_by_group(),
        "kernels": sum(kernel.times for kernel in program.kernels),
    }  # fmt: skip


def measure_grid(device: str, policy: str, remat: str) -> dict[str, Any]:
    """Peak and bytes moved by framework, and every rule that a program breaks."""
    flags = {"model": "gpt2", "policy": policy, "remat": remat, "batch_size": 8}
    config, target = from_flags(PLAIN | flags, accelerator=True), targets.find(device)
    found = {name: make(name, config, device) for name in twin.MODULES}
    wrong = [f"{name}: {line}" for name, program in found.items()
             for line in rules.violations(program, config, target)]  # fmt: skip
    peaks, moved = ({n: getattr(p, what) for n, p in found.items()} for what in ("peak", "moved"))
    return {"peak": peaks, "moved": moved, "wrong": wrong}


def measure_known(framework: str, cell: Flags, gpu: str) -> dict[str, Any]:
    program = make(framework, from_flags({**PLAIN, **cell, "steps": 1}, accelerator=True), gpu)
    roofline = report.roofline(program, targets.find(gpu))
    by = {"attention": program.attention_asked, "library": program.switches.get(LIBRARY, "0")}
    return {**figures(program), "roofline": roofline, **by}


def grid_table(stored: dict[str, results.Row]) -> str:
    rows = []
    for name, row in stored.items():
        peak, moved = ([row[what][f] / 1e9 for f in twin.MODULES] for what in ("peak", "moved"))
        cells = f"{peak[0]:.2f}", f"{peak[1]:.2f}", f"{peak[0] / peak[1]:.2f}"
        rows.append([name, *cells, *(f"{each:.1f}" for each in moved)])
    faults = [f"{name}, {line}" for name, row in stored.items() for line in row["wrong"]]
    return "\n\n".join([markdown(GRID_HEAD, rows), *faults])
