"""`python -m benchmarks.compiled jax|torch [GROUP ...]`: cells that `lockstep plan` is fitted to.

Shapes are drawn as large as those that are trained: nothing runs, XLA compiles each step and torch
traces it for a CUDA device that is not here (`lockstep compile`). A row is written as soon as its
program is known, or refused with the compiler's words; the same call goes on where it was stopped.
"""

import math
import sys
import time
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.cells import Flags
from benchmarks.memory import FAMILIES, Range, draw_shape, with_rows
from benchmarks.suites import REMAT
from lockstep import provenance, results, twin
from lockstep.compile import report, targets
from lockstep.compile.ask import Compiler
from lockstep.compile.program import Program
from lockstep.config import from_flags
from lockstep.errors import UserError, require
from lockstep.exits import DONE, exit_status
from lockstep.flags import Parser
from lockstep.provenance import HANDED_ON, TRAINING

FOLDER = Path(__file__).parent / "results"
PATHS = (  # what decides a program
    *TRAINING, "lockstep/compile", "lockstep_compiler", *HANDED_ON,
)  # fmt: skip
# Cells of a group, and which are fitted; fresh ones, none. A trace takes a second, XLA ten.
EACH, FITTED, FRESH = {"jax": 3, "torch": 4}, {"jax": (0, 1), "torch": (0, 3)}, 1
SPLITS = (1, 1, 2, 1, 2)  # micro-batches, in turn
CHUNKS = ("1", "auto", "1", "4")  # of the loss, in turn


class Kind(NamedTuple):
    """Cells whose programs are alike: their policies and devices take turns."""

    policies: tuple[str, ...]
    devices: tuple[str, ...]


AMPERE = ("h100", "a100-80")
# torch has the same kernels everywhere; XLA before Ampere no fused attention, and cuBLAS alone.
KINDS = {
    "jax": {"half": Kind(("bf16", "fp16"), AMPERE), "half-t4": Kind(("fp16",), ("t4",)),
            "single": Kind(("fp32", "tf32"), AMPERE), "single-t4": Kind(("fp32",), ("t4",))},
    "torch": {"half": Kind(("fp16", "bf16"), (*AMPERE, "t4")),
              "single": Kind(("fp32", "tf32"), (*AMPERE, "t4"))},
}  # fmt: skip


DRAWN = Range(
    layers=(2, 3, 4, 6, 8, 12), contexts=(256, 512, 1024, 2048), vocabularies=(512, 8192, 50304),
    widths=((256, 4), (512, 8), (768, 12), (1024, 8), (1536, 24), (2048, 16)), bytes=(1e9, 30e9),
)  # fmt: skip
DRAWN_FRESH = Range(
    layers=(5, 9, 10, 16), widths=((384, 6), (640, 10), (1280, 20), (2560, 32)),
    contexts=(128, 768, 1536, 4096), vocabularies=(256, 16384, 65024), bytes=(2e9, 60e9),
)  # fmt: skip
# Rough bytes for each token: of a block, by remat, and of what is there once; only to draw rows by.
ROUGH = {"none": 40, "dots": 25, "sublayer": 6, "block": 3, "sqrt": 4}


def drawn(framework: str) -> dict[str, tuple[str, Flags]]:
    """Name of a row -> its device and flags, the first of every group first."""
    groups = list(product(KINDS[framework].items(), FAMILIES, REMAT))
    found = {}
    for kindred, among, count in (("drawn", DRAWN, EACH[framework]), ("fresh", DRAWN_FRESH, FRESH)):
        random = np.random.Generator(np.random.Philox(7 + (kindred == "fresh")))
        for number in range(count):
            for turn, ((kind, (policies, devices)), model, remat) in enumerate(groups, number):
                flags = draw(random, among, {
                    "model": model, "policy": policies[number // len(devices) % len(policies)],
                    "remat": remat, "accum": SPLITS[turn % len(SPLITS)],
                    "loss_chunks": CHUNKS[turn % len(CHUNKS)],
                })  # fmt: skip
                device = devices[number % len(devices)]
                found[f"{kind} {model} {remat} {kindred} {number}"] = device, flags
    return found


def draw(random: np.random.Generator, among: Range, group: Flags) -> Flags:
    flags = draw_shape(random, among, group)
    if group["remat"] == "sqrt":
        flags["n_layer"] += 3  # fewer than four are one segment
    token = flags["d_model"] * (ROUGH[group["remat"]] * flags["n_layer"] + 50) + 10 * flags["vocab"]
    low, high = map(math.log, among.bytes)
    return with_rows(flags, math.exp(random.uniform(low, high)), token)


def figures(program: Program, device: str) -> dict[str, Any]:
    """What is fitted of a program."""
    moved: Counter[str] = Counter()
    for kernel in program.kernels:
        moved[kernel.group] += kernel.bytes * kernel.times
    return {
        "peak": program.peak, "parts": program.parts, "flops": program.flops, "moved": dict(moved),
        "kernels": sum(kernel.times for kernel in program.kernels),
        "roofline": report.roofline(program, targets.find(device)),
        "attention": program.attention_asked,
    }  # fmt: skip


def file(framework: str) -> Path:
    return FOLDER / f"compiled-{framework}.jsonl"


def programs(framework: str) -> dict[str, results.Row]:
    """What is known, by name, without what a compiler refused."""
    rows = results.read(file(framework))
    return {name: row for name, row in rows.items() if "refused" not in row}


def unfinished(framework: str, groups: list[str]) -> dict[str, tuple[str, Flags]]:
    """What today's code has not been asked, of names that begin with one of `groups`; what nobody
    has asked comes first."""
    known, found = results.read(file(framework)), {}
    for name, (device, flags) in drawn(framework).items():
        asked = is_current(known.get(name)) and known[name]["cell"] == flags
        if not asked and any(name.startswith(group) for group in groups or [""]):
            found[name] = device, flags
    return dict(sorted(found.items(), key=lambda item: item[0] in known))


def is_current(row: results.Row | None) -> bool:
    """Whether it is there, and of the program that today's code compiles."""
    return row is not None and provenance.is_current(row["measured"], PATHS)


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = Parser(prog="python -m benchmarks.compiled", description=__doc__)
    parser.add_argument("framework", metavar="FRAMEWORK", help="jax, torch")
    parser.add_argument("groups", metavar="GROUP", nargs="*",
                        help="how its name begins, as 'half gpt2' (default: all)")  # fmt: skip
    given = parser.parse_args(argv)
    twin.require_known(given.framework)
    left = unfinished(given.framework, given.groups)
    require(bool(left) or not given.groups, "GROUP", given.groups, "unknown, or finished")
    compiler = Compiler(given.framework)
    for number, (name, (device, flags)) in enumerate(left.items()):
        began = time.perf_counter()
        config = from_flags({**flags, "steps": 1}, accelerator=True)
        try:
            found = figures(compiler.program(config, device), device)
        except UserError as refusal:
            found = {"refused": str(refusal)}
        seconds = time.perf_counter() - began
        row = results.row(name, device, round(seconds, 2), cell=flags, **found)
        results.put(file(given.framework), [row])
        said = found.get("refused") or f"{found['peak'] / 1e9:.2f} GB"
        print(f"[{number + 1}/{len(left)}] {name}: {said}", flush=True)
    compiler.close()
    return DONE


if __name__ == "__main__":
    sys.exit(exit_status(main))
