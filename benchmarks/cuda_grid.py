"""JAX beside PyTorch over policies and remat, without a GPU.

GPT-2, 8 sequences a step, as compiled (JAX) and traced (PyTorch) for an H100 and a T4: peak memory,
bytes moved, and what breaks a rule. Half an hour of one core; needs the extra [aot].
"""

from contextlib import closing
from typing import Any

from benchmarks import tables
from lockstep import results, twin
from lockstep.compile import rules, targets
from lockstep.compile.ask import Compiler
from lockstep.config import from_flags
from lockstep.parity.matrix import FACTORS

POLICIES = {"h100": ("bf16", "fp16", "fp32", "tf32"), "t4": ("fp16", "fp32")}
CELLS = [(d, p, r) for d, found in POLICIES.items() for p in found for r in FACTORS["remat"]]
HEAD = ["device, policy, remat", "peak in GB, JAX", "PyTorch", "JAX over PyTorch",
        "moved in GB, JAX", "PyTorch"]  # fmt: skip


def measure(device: str, policy: str, remat: str) -> dict[str, Any]:
    """Peak and bytes moved by framework, and every rule that a program breaks."""
    flags = {"model": "gpt2", "policy": policy, "remat": remat, "batch_size": 8}
    config, target, found = from_flags(flags, accelerator=True), targets.find(device), {}
    for name in twin.MODULES:
        with closing(Compiler(name)) as compiler:
            found[name] = compiler.program(config, device)
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
    wrong = [f"{name}, {line}" for name, row in stored.items() for line in row["wrong"]]
    return "\n\n".join([tables.markdown(HEAD, rows), *wrong])
