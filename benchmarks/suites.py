"""The jobs of what `python -m benchmarks.run NAME` measures, the most valuable first."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple

from benchmarks import compiled, speed
from benchmarks.cells import SMALL, TOY, Cell, Flags
from benchmarks.jobs import Job
from benchmarks.measure import about
from benchmarks.public_ports import measure as ports

OURS = ("jax", "torch", "torch-compiled")
REMAT = ("none", "sublayer", "block", "sqrt", "dots")


class Suite(NamedTuple):
    what: str
    jobs: Callable[[str], list[Job]]  # of a device


def cells(table: str, contenders: tuple[str, ...], rows: list[Flags], **length: Any) -> list[Job]:
    """Row after row, the contenders of one next to each other: they are what is compared."""
    listed = [
        Cell(table=table, contender=contender, flags=flags, **length)
        for flags in rows
        for contender in contenders
    ]
    return [
        Job(name=cell.name, work="benchmarks.measure:measure_cell", given=about(cell),
            device=cell.device)
        for cell in listed
    ]  # fmt: skip


def rounds(listed: Iterable[Job], count: int = 1) -> list[Job]:
    """Round after round, so that A is measured before and after B; what is no cell only once."""
    tasks, found = list(listed), []
    for number in range(1, count + 1):
        for job in tasks:
            if "cell" in job.given:
                found.append(replace(job, name=f"{job.name}.{number}"))
            elif number == 1:
                found.append(job)
    return found


def policies(base: Flags, *names: str) -> list[Flags]:
    return [{**base, "policy": name} for name in names]


def accumulation(base: Flags, rows: int, splits: tuple[int, ...]) -> list[Flags]:
    """So many rows in one optimizer step, as N micro-batches of a N-th each."""
    return [base | {"accum": n, "batch_size": max(1, rows // n)} for n in splits]


def remat(base: Flags) -> list[Flags]:
    return [base | {"remat": mode} for mode in REMAT]


def smoke(device: str) -> list[Job]:
    quick = {"device": device, "warmup": 1, "windows": 3, "steps": 1}
    rows = policies(TOY | {"batch_size": 2}, "bf16", "fp32")
    return rounds([
        *cells("frameworks", ("jax", "torch"), rows, **quick),
        *cells("accumulation", ("jax", "torch"), [rows[0] | {"accum": 4}], **quick),
        *cells("remat", ("jax", "torch"), [rows[0] | {"remat": "block"}], **quick),
    ])  # fmt: skip


def cpu(device: str) -> list[Job]:
    whole = {"device": device, "warmup": 1, "windows": 5, "steps": 1}
    rows = policies(SMALL | {"batch_size": 4}, "bf16", "fp32")
    return rounds([
        *cells("frameworks", OURS, rows, **whole),
        *cells("accumulation", ("jax", "torch"), accumulation(rows[0], 8, (1, 2, 8)), **whole),
        *cells("remat", ("jax", "torch"), remat(rows[0] | {"layers": "scan"}), **whole),
        *races(device),
    ], 2)  # fmt: skip


def drift(device: str) -> list[Job]:
    """Takes as many steps as on a GPU: what the bound on final losses is made from."""
    long = {"device": device, "warmup": 10, "windows": 6, "steps": 10}
    rows = policies(SMALL | {"batch_size": 4}, "bf16", "fp32")
    return rounds(cells("frameworks", ("jax", "torch"), rows, **long))


def frameworks(device: str) -> list[Job]:
    """Models of docs/benchmarks.md on one GPU; in float32 fewer steps, for they are slow.

    On a CPU GPT-2 alone, one row at a time.
    """
    usual = {"device": device, "warmup": 10, "windows": 6, "steps": 10}
    slow = usual | {"warmup": 2, "windows": 4, "steps": 5}
    models: list[Flags] = [
        {"model": "gpt2", "batch_size": 32},
        {"model": "gpt2-medium", "batch_size": 16},
        {"model": "gpt3-1.3b", "batch_size": 4},
        {"model": "1b", "batch_size": 4},
    ]
    policies = ["bf16", "fp16", "fp32", "tf32"]
    if device == "cpu":
        models, policies = [{"model": "gpt2", "batch_size": 1}], ["bf16", "fp32"]
        usual = slow = {"device": device, "warmup": 1, "windows": 5, "steps": 1}
    return [
        job
        for model in models
        for policy in policies
        for mode in ({"remat": "none"}, {"remat": "block"})
        for job in cells(
            "frameworks", OURS, [model | {"policy": policy} | mode],
            **(slow if policy in ("fp32", "tf32") else usual),
        )
    ]  # fmt: skip


def gpu(device: str) -> list[Job]:
    """Lists cells beside `frameworks`: small models, micro-batches, GPT-2's remat modes."""
    whole = {"device": device, "warmup": 10, "windows": 6, "steps": 10}
    gpt2 = {"model": "gpt2", "batch_size": 32, "policy": "bf16"}
    small, medium = {"model": "10m", "batch_size": 256}, {"model": "30m", "batch_size": 128}
    every = ("bf16", "fp32", "tf32", "fp16")
    listed = rounds([
        *cells("10m", OURS, policies(small, *every), **whole),
        *cells("30m", OURS, policies(medium, *every), **whole),
        *cells("accumulation", OURS, accumulation(gpt2, 32, (1, 4, 16)), **whole),
        *cells("remat", OURS, remat(gpt2), **whole),
    ], 2)  # fmt: skip
    return [replace(job, limit=1200) for job in listed]


def races(device: str, **length: int) -> list[Job]:
    """On a CPU, whatever the device."""
    return [
        Job(name=f"race {race.name}", work="benchmarks.speed:measure",
            given={**asdict(race), **length})
        for race in speed.RACES
    ]  # fmt: skip


SUITES: dict[str, Suite] = {
    "smoke": Suite("does it run at all, in three minutes", smoke),
    "cpu": Suite("what two hours on two cores can tell", cpu),
    "drift": Suite("how far 45 steps take equivalent baselines apart", drift),
    "gpu": Suite("small models, accumulation and remat, on one CUDA GPU", gpu),
    "frameworks": Suite("four models in both frameworks, on one GPU; GPT-2 on a CPU", frameworks),
    "speed": Suite("races of our steps against steps by hand, on a CPU", races),
    "speed-short": Suite("the same races, a minute each", partial(races, pairs=20, restarts=2)),
    "public-ports": Suite("lockstep check on public ports, in --root", ports.jobs),
    "cuda-grid": Suite("peak memory on an H100 and a T4, compiled and traced", compiled.grid_jobs),
    **{f"compiled-{file}": Suite("programs that the plan is held to, compiled again",
                                 partial(compiled.known_jobs, file))
       for file in ("jax", "torch", "mesh")},
}  # fmt: skip
