"""PyTorch's step as Inductor writes it for a GPU that is not here, beside the eager trace.

Roofline, peak memory and bytes that are moved outside of matmuls and attention, each eager and
compiled. Twenty minutes of one core; needs the extra [aot].
"""

from contextlib import closing
from typing import Any

from benchmarks import programs, tables
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
    *(("h200", {**GPT2, "policy": policy, "remat": remat})
      for policy in ("bf16", "fp32") for remat in FACTORS["remat"]),
    *(("h200", {**GPT2, "policy": "tf32", "remat": remat}) for remat in MODES),
    *(("h200", {**model, "policy": "bf16", "remat": remat})
      for model in (MEDIUM, LLAMA) for remat in (*MODES, "sqrt")),
    *(("h200", {**model, "policy": "fp32", "remat": "block"}) for model in (MEDIUM, LLAMA)),
    *(("t4", {"model": "gpt2", "batch_size": 4, "policy": "fp16", "remat": remat})
      for remat in MODES),
]  # fmt: skip
WAYS = ("eager", "compiled")
HEAD = ["device, model, policy, remat", "roofline in ms, eager", "compiled", "peak in GB, eager",
        "compiled", "planned", "moved in GB, eager", "compiled", "planned"]  # fmt: skip


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
    """Both ways beside each other, and what the plan counts for the compiled one."""
    planned = {known.name: known for known in programs.by_inductor()}
    rows = []
    for name, row in stored.items():
        ways, known = [row[way] for way in WAYS], planned[name]
        rows.append([
            name, *(f"{each['roofline'] * 1e3:.1f}" for each in ways),
            *(f"{each['peak'] / 1e9:.2f}" for each in ways), f"{known.memory_error:+.1%}",
            *(f"{each['moved']['rest'] / 1e9:.1f}" for each in ways), f"{known.moved_error:+.1%}",
        ])  # fmt: skip
    broken = [f"{name}, {line}" for name, row in stored.items() for line in row["broken"]]
    return "\n\n".join([tables.markdown(HEAD, rows), *broken])
