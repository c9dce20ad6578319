"""`python -m benchmarks.memory jax|torch|fit`: measures, then fits, what `lockstep plan` knows.

Bytes are the framework's own account of one step (`Twin.step_bytes`). Shapes are drawn, each with
rows enough for some hundred MB. Every second cell is fitted; the others say how far the fit is off.
"""

import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cells import Flags
from benchmarks.measure import write
from lockstep import loop, twin
from lockstep.config import from_flags
from lockstep.errors import UserError, require
from lockstep.flags import Parser
from lockstep.parity import provenance
from lockstep.parity.pair import GPT
from lockstep.plan import memory, shape
from lockstep.plan.memory import Setting
from lockstep.precision import resolve

RESULTS = Path(__file__).parent / "results" / "memory"
FAMILIES = ("gpt2", "tiny")
POLICIES = ("fp32", "bf16")
REMAT = ("none", "sublayer", "block", "sqrt", "dots")
SPLITS = (1, 1, 2, 1)  # micro-batches, in turn
EACH = 16  # cells of a group, half of them fitted
COUNTED = 200e6  # bytes of state and step, from which a cell's error counts
LAYERS, WIDTHS = (3, 4, 6, 8, 12), ((128, 4), (192, 3), (256, 4), (384, 6))
CONTEXTS, VOCABULARIES = (64, 128, 256), (256, 1024, 4096)
LEAST, MOST = 220e6, 600e6  # bytes aimed at
# Rough bytes for each token: of a block, by remat, and of what is there once; only to draw rows by.
ROUGH = {"none": 150, "dots": 90, "sublayer": 12, "block": 5, "sqrt": 8}


def drawn() -> list[Flags]:
    """The same cells for both frameworks."""
    random = np.random.Generator(np.random.Philox(0))
    return [
        draw(random, {"model": model, "policy": policy, "remat": remat,
                      "accum": SPLITS[number // 2 % len(SPLITS)]})
        for model, policy, remat, number in product(FAMILIES, POLICIES, REMAT, range(EACH))
    ]  # fmt: skip


def draw(random: np.random.Generator, group: Flags) -> Flags:
    d, heads = WIDTHS[random.integers(len(WIDTHS))]
    layers, context, vocab = (int(random.choice(x)) for x in (LAYERS, CONTEXTS, VOCABULARIES))
    depth = memory.kept(layers, group["remat"])
    token = d * (ROUGH[group["remat"]] * depth + 150) + 10 * vocab
    rows = random.uniform(LEAST, MOST) / (token * context)
    layout = "unroll" if group["remat"] == "none" else "scan"  # see docs/benchmarks.md, Recomputing
    return {**group, "n_layer": layers, "n_head": heads, "d_model": d, "context": context,
            "vocab": vocab, "batch_size": max(1, round(rows)), "layers": layout}  # fmt: skip


def measure(framework: str, flags: Flags) -> dict[str, Any]:
    config = from_flags({**flags, "device": "cpu", "steps": 1}, accelerator=False)
    built = twin.load(framework, config)
    built.load(loop.initial_state(config))
    return {**flags, "step_bytes": built.step_bytes(GPT.window(config, 0))}


def setting(framework: str, flags: Flags) -> tuple[shape.Shape, Setting]:
    config = from_flags({**flags, "steps": 1}, accelerator=False)
    return shape.of_model(config.model), Setting(
        framework=framework, roles=resolve(flags["policy"]), remat=flags["remat"],
        rows=flags["batch_size"], accum=flags["accum"], written_out=framework == "jax",
    )  # fmt: skip


def fit(framework: str, cells: list[Flags]) -> dict[str, float]:
    """Constants of one group, by least squares of the relative error, none below zero.

    Which moment a cell's peak is at is not known before: each cell is fitted at the moment that the
    last constants give, until none moves.
    """
    settings = [setting(framework, cell) for cell in cells]
    amounts = [memory.terms(*given) for given in settings]
    peaks = np.array([cell["step_bytes"] for cell in cells], float)
    constants = {"gradients": 4.0} | dict.fromkeys((*memory.START, "block"), 0.0)
    at_end = np.array([8 * a["gradients"] > p for a, p in zip(amounts, peaks)])
    for _ in range(20):
        for names, chosen in ((memory.START, ~at_end), (memory.END, at_end)):
            known = np.array([memory.held(*given, names) for given in settings])
            rows = np.array([[a[name] for name in names] for a in amounts])
            if chosen.any():
                wanted = (peaks - known)[chosen]
                constants |= zip(names, nonnegative(rows[chosen], wanted, peaks[chosen]))
        both = [memory.moments(*given, constants) for given in settings]
        new = np.array([sum(end.values()) > sum(start.values()) for start, end in both])
        if (new == at_end).all():
            break
        at_end = new
    return {name: float(f"{value:.4g}") for name, value in constants.items()}


def nonnegative(rows: np.ndarray, wanted: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """x >= 0 with rows x near `wanted`, the gap in units of `scale`.

    What would be negative is left out, the worst first.
    """
    x, used = np.zeros(rows.shape[1]), np.array(rows.any(axis=0))
    while used.any():
        found, *_ = np.linalg.lstsq(rows[:, used] / scale[:, None], wanted / scale, rcond=None)
        if (found >= 0).all():
            x[used] = found
            break
        worst = (found * rows[:, used].max(axis=0)).argmin()
        used[np.flatnonzero(used)[worst]] = False
    return x


def groups(framework: str, cells: list[Flags]) -> dict[str, list[Flags]]:
    found: dict[str, list[Flags]] = {}
    for cell in cells:
        found.setdefault(memory.key(*setting(framework, cell)), []).append(cell)
    return found


def error(framework: str, cell: Flags, constants: dict[str, float]) -> float | None:
    """Of state and step together, relative; None where they are too small to count."""
    given, how = setting(framework, cell)
    held = memory.state_bytes(given, how.roles)
    total = held + cell["step_bytes"]
    predicted = held + memory.step_bytes(given, how, constants)
    return predicted / total - 1 if total >= COUNTED else None


def fit_all(measured: dict[str, list[Flags]]) -> dict[str, Any]:
    """The constants of every group, and the errors on the cells that were not fitted."""
    fitted, errors = {}, {}
    for framework, cells in measured.items():
        for name, group in groups(framework, cells).items():
            fitted[name] = fit(framework, group[::2])
            held_out = [error(framework, cell, fitted[name]) for cell in group[1::2]]
            errors[name] = [round(e, 4) for e in held_out if e is not None]
    return {"groups": fitted, "errors": errors}


def markdown(content: dict[str, Any]) -> str:
    """Of each group the worst and the median error, on cells that were not fitted."""
    lines = ["| group | cells | median error | worst |", "| --- | --- | --- | --- |"]
    for name, errors in content["errors"].items():
        sizes = np.abs(errors)
        worst = errors[int(sizes.argmax())]
        lines.append(f"| {name} | {len(errors)} | {np.median(sizes):.1%} | {worst:+.1%} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = Parser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("what", metavar="WHAT", help="jax, torch: measure; fit")
    try:
        given = parser.parse_args(argv)
        names = (*twin.MODULES, "fit")
        require(given.what in names, "WHAT", given.what, f"unknown; use {', '.join(names)}")
    except UserError as mistake:
        print(f"error: {mistake}", file=sys.stderr)
        return 2
    if given.what != "fit":
        cells = drawn()
        measured = []
        for number, cell in enumerate(cells):
            measured.append(measure(given.what, cell))
            print(f"[{number + 1}/{len(cells)}] {measured[-1]}", flush=True)
        write(RESULTS / f"{given.what}.json", {**provenance.about("cpu"), "cells": measured})
        return 0
    files = {name: RESULTS / f"{name}.json" for name in twin.MODULES}
    content = fit_all({name: json.loads(file.read_text())["cells"] for name, file in files.items()})
    write(memory.CONSTANTS, content)
    print(markdown(content))
    return 0


if __name__ == "__main__":
    sys.exit(main())
