"""`lockstep plan --measure`: a race of the programs on the machine at hand, in ten minutes.

Each cell is a short run of a trainer, alone on the machine: compiled PyTorch, JAX and eager
PyTorch without remat, then with block remat, all with the same sequences in a micro-batch. The
policy is bf16, or fp16 on a GPU before Ampere. On a CPU, where PyTorch is not compiled by default,
fp32 is raced too.
"""

import argparse
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from lockstep import devices, nvidia, results
from lockstep.config import PRESETS
from lockstep.config.policy import POLICIES
from lockstep.devices import Device
from lockstep.errors import require
from lockstep.plan import recommend, report, timing, trainer
from lockstep.plan.recommend import ALL_AT_ONCE
from lockstep.plan.setting import Setting, counts_as_ampere
from lockstep.plan.shape import Shape
from lockstep.run.directory import require_writable_file

CPU, CUDA = "cpu", "cuda"
MINUTES = 10.0
REMAT = ("none", "block")
MOST_ROWS = 32  # sequences in a micro-batch, where memory allows more
FEW_ROWS = 8  # on a CPU, and on a GPU of unknown memory
UNUSED = ("memory", "devices", "policy", "remat")  # flags of a prediction


class Host(NamedTuple):
    """A machine to race on: its platform, the name that its driver reports, and its data sheet."""

    platform: str
    name: str
    capability: tuple[int, int] | None = None
    device: Device | None = None


def check(given: argparse.Namespace) -> None:
    """
    Raises:
        UserError: a flag of a prediction, or a model that no trainer has.
    """
    for name in UNUSED:
        value = getattr(given, name)
        require(not value, f"--{name}", value, "predicts; with --measure, drop it")
    remedy = f"--measure runs on the machine at hand; drop it, or give {CPU}"
    require(given.device in (None, CPU), "--device", given.device, remedy)
    remedy = "only a preset can be trained; drop --measure"
    require(given.model in PRESETS, "--measure", given.model, remedy)
    require(0 < given.minutes < float("inf"), "--minutes", given.minutes, "must be above 0")
    if given.out:
        require_writable_file(Path(given.out))


def find_machine(device: str | None) -> Host:
    """Finds NVIDIA's first GPU; the CPU if there is none, or if `device` asks for it."""
    gpus = [] if device == CPU else nvidia.query_gpus("name", "compute_cap")[0]
    if not gpus:
        return Host(CPU, CPU)
    name, capability = gpus[0]
    return Host(CUDA, name, nvidia.read_capability(capability), devices.find_reported(name))


def list_cells(given: argparse.Namespace, shape: Shape, here: Host) -> list[Setting]:
    """Lists what is raced, the most telling first."""
    policy = "fp16" if devices.is_before_ampere(here.capability) else "bf16"
    programs = [("torch", True), ("jax", False), ("torch", False)][here.platform == CPU :]
    modes = [(policy, mode) for mode in REMAT]
    if here.platform == CPU:
        modes.insert(1, ("fp32", "none"))
    cells = [
        Setting(
            framework=framework, compiled=compiled, policy=policy, remat=remat, rows=1,
            ampere=here.device is not None and counts_as_ampere(here.device),
            loss_chunks=given.loss_chunks or ALL_AT_ONCE,
        )
        for (policy, remat), (framework, compiled) in product(modes, programs)
        if given.framework in (None, framework)
    ]  # fmt: skip
    return choose_rows(given, shape, here, cells)


def choose_rows(
    given: argparse.Namespace, shape: Shape, here: Host, cells: list[Setting]
) -> list[Setting]:
    """Gives all cells one micro-batch, so that they can be compared.

    It is the largest power of two that each is predicted to have room for. Where not one sequence
    fits without remat, only the cells with remat remain.
    """
    rows = given.micro_batch or FEW_ROWS
    if here.device and not given.micro_batch:
        fitting = {s: _largest(shape, here.device, s) for s in cells}
        cells = [s for s in cells if fitting[s]] or cells
        rows = min(fitting[s] or 1 for s in cells)
    accum = -(-(given.tokens_per_step or 1) // (rows * shape.context))
    return [_sized(s, rows, accum) for s in cells]


def _largest(shape: Shape, device: Device, s: Setting) -> int:
    sizes = [2**i for i in range(MOST_ROWS.bit_length())]
    return max(
        (n for n in sizes if recommend.judge_setting(shape, device, _sized(s, n, 1)).fits),
        default=0,
    )


def _sized(s: Setting, rows: int, accum: int) -> Setting:
    fields = vars(s) | {"rows": rows, "accum": accum}
    return Setting(**fields)


def run(given: argparse.Namespace, shape: Shape) -> dict[str, Any]:
    """Races the cells, each within its share of the minutes that are left.

    Prints a line after each (to stderr with `--json`), and keeps its row in `--out`.

    Returns:
        The machine, a row for each cell, and the fastest one, as JSON.
    """
    here, stream = find_machine(given.device), sys.stderr if given.json else sys.stdout
    cells = list_cells(given, shape, here)
    print(report.race_head(shape, here.name, cells[0], given.minutes), file=stream, flush=True)
    rows: list[dict[str, Any]] = []
    end = time.monotonic() + 60 * given.minutes
    for number, setting in enumerate(cells):
        seconds = (end - time.monotonic()) / (len(cells) - number)
        rows.append(_measure(given, shape, here, setting, seconds))
        print(report.race_line(rows), file=stream, flush=True)
    best = find_fastest(rows)
    content: dict[str, Any] = {"machine": here.name, "rows": rows, "recommended": best}
    if best:
        content |= trainer.run_cost(given, best["tokens_per_second"])
    return content


def find_fastest(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Finds the row with the most tokens/s; None if all failed."""
    able = [row for row in rows if "failed" not in row]
    return max(able, key=lambda row: row["tokens_per_second"], default=None)


def _measure(
    given: argparse.Namespace, shape: Shape, here: Host, s: Setting, seconds: float
) -> dict[str, Any]:
    """Measures a cell; returns its row, which is also kept in `--out`."""
    words = trainer.command(given, s)
    began = time.monotonic()
    found = timing.measure([*words, "--device", here.platform], seconds)
    row = {"program": s.program, "policy": s.policy, "remat": s.remat, "rows": s.rows,
           "accum": s.accum, "command": words, "mfu": None, **found}  # fmt: skip
    peak = here.device.peak(POLICIES[s.policy]) if here.device else 0
    if peak and "failed" not in row:
        row["mfu"] = row["tokens_per_second"] * shape.flops_per_token / peak
    if given.out:
        name = f"plan-{given.model}-t{shape.context}-{s.program}-{s.policy}-{s.remat}-b{s.rows}"
        took = time.monotonic() - began
        kept = results.row(name, here.platform, took, machine=here.name, **row)
        results.put(Path(given.out), [kept])
    return row
