"""PyTorch's step as Inductor writes it for a GPU that is not here, beside the eager trace.

Peak memory, bytes moved, kernels and roofline, each eager and compiled. Ten minutes of one
core; needs the extra [aot].
"""

from contextlib import closing
from typing import Any

from benchmarks import tables
from benchmarks.cells import Flags
from lockstep import results
from lockstep.compile import report, rules, targets
from lockstep.compile.ask import Compiler
from lockstep.config import from_flags
from lockstep.parity.matrix import FACTORS

GPT2: Flags = {"model": "gpt2", "batch_size": 32}
MEDIUM: Flags = GPT2 | {"n_layer": 24, "n_head": 16, "d_model": 1024, "batch_size": 16}
LLAMA: Flags = {"model": "1b", "batch_size": 4}
MODES = ("none", "block")
CELLS: list[tuple[str, Flags]] = [
    *(("h200", {**GPT2, "policy": "bf16", "remat": remat}) for remat in FACTORS["remat"]),
    *(("h200", {**GPT2, "policy": policy, "remat": remat})
      for policy in ("fp32", "tf32") for remat in MODES),
    *(("h200", {**model, "policy": "bf16", "remat": remat})
      for model in (MEDIUM, LLAMA) for remat in MODES),
    *(("t4", {"model": "gpt2", "batch_size": 4, "policy": "fp16", "remat": remat})
      for remat in MODES),
]  # fmt: skip
WAYS = ("eager", "compiled")
HEAD = ["device, model, policy, remat", "moved in GB, eager", "compiled", "roofline in ms, eager",
        "compiled", "peak in GB, eager", "compiled"]  # fmt: skip


def name_of(device: str, flags: Flags) -> str:
    short = {"n_layer": "l", "d_model": "d", "batch_size": "b"}
    sizes = "".join(f" {letter}{flags[key]}" for key, letter in short.items() if key in flags)
    return f"{device}, {flags['model']}{sizes}, {flags['policy']}, {flags['remat']}"


def measure(device: str, flags: Flags) -> dict[str, Any]:
    """The figures of both ways, and every rule that a program breaks."""
    target, found, wrong = targets.find(device), {}, []
    with closing(Compiler("torch")) as compiler:
        for way in WAYS:
            config = from_flags({**flags, "compile": way == "compiled"}, accelerator=True)
            program = compiler.program(config, device)
            times = report.roofline(program, target)
            assert times is not None
            found[way] = {
                "peak": program.peak, "flops": program.flops, "moved": program.moved_by_group(),
                "kernels": sum(kernel.times for kernel in program.kernels),
                "roofline": sum(times.values()), "parts": program.parts,
            }  # fmt: skip
            wrong += [f"{way}: {line}" for line in rules.violations(program, config, target)]
    return {**found, "broken": wrong}


def markdown(stored: dict[str, results.Row]) -> str:
    rows = []
    for name, row in stored.items():
        ways = [row[way] for way in WAYS]
        figures = [f"{sum(each['moved'].values()) / 1e9:.1f}" for each in ways]
        figures += [f"{each['roofline'] * 1e3:.1f}" for each in ways]
        rows.append([name, *figures, *(f"{each['peak'] / 1e9:.2f}" for each in ways)])
    broken = [f"{name}, {line}" for name, row in stored.items() for line in row["broken"]]
    return "\n\n".join([tables.markdown(HEAD, rows), *broken])
