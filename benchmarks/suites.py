"""Which cells a suite has, the most valuable first."""

from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.cells import Cell, Flags
from benchmarks.process import LIMIT
from lockstep.config import policy

OURS = ("jax", "torch", "torch-compiled")
PEERS = ("hf-trainer", "accelerate", "nanogpt", "bare-jax")
REMAT = ("none", "sublayer", "block", "sqrt", "dots")
POLICIES = ("fp64", "fp32", "bf16", "fp16", "tf32")
NARROW = tuple(name for name, roles in policy.POLICIES.items() if roles.recipe)
# GPT-2's family, because every peer has it; bytes as tokens. About 0.4 M and 11 M parameters.
TOY: Flags = {"model": "gpt2", "n_layer": 2, "n_head": 4, "d_model": 128, "context": 64,
              "vocab": 256}  # fmt: skip
SMALL: Flags = {"model": "gpt2", "n_layer": 6, "n_head": 6, "d_model": 384, "context": 256,
                "vocab": 256}  # fmt: skip


class Command(NamedTuple):
    """Something else that a suite runs, which writes its own result as JSON."""

    name: str
    words: tuple[str, ...]  # of the command line after `python -m`; {out} is the result's file
    limit: float = LIMIT  # seconds


Task = Cell | Command


class Suite(NamedTuple):
    what: str
    device: str
    rounds: int  # the grid is walked so often: a machine that drifts shows in their spread
    tasks: list[Task]
    limit: float = LIMIT  # seconds of a cell


def cells(table: str, contenders: tuple[str, ...], rows: list[Flags], **length: Any) -> list[Task]:
    """Row after row, the contenders of one next to each other: they are what is compared."""
    return [
        Cell(table=table, contender=contender, flags=flags, **length)
        for flags in rows
        for contender in contenders
    ]


def policies(base: Flags, *names: str) -> list[Flags]:
    return [{**base, "policy": name} for name in names]


def smoke(device: str) -> Suite:
    quick = {"device": device, "warmup": 1, "windows": 3, "steps": 1}
    toy = TOY | {"batch_size": 2}
    rows = policies(toy, "bf16", "fp32")
    return Suite("does it run at all, in three minutes", device, 1, [
        *cells("frameworks", ("jax", "torch"), rows, **quick),
        *cells("frameworks", PEERS, rows[:1], **quick),
        *cells("accumulation", ("jax", "torch"), [rows[0] | {"accum": 4}], **quick),
        *cells("remat", ("jax", "torch"), [rows[0] | {"remat": "block"}], **quick),
    ])  # fmt: skip


def cpu(device: str) -> Suite:
    whole = {"device": device, "warmup": 1, "windows": 5, "steps": 1}
    base = SMALL | {"batch_size": 4}
    rows = policies(base, "bf16", "fp32")
    return Suite("what an hour on two cores can tell", device, 2, [
        *cells("frameworks", (*OURS, *PEERS, "bare-jax-keeping"), rows, **whole),
        *cells("accumulation", ("jax", "torch"), accumulation(rows[0], 8, (1, 2, 8)), **whole),
        *cells("remat", ("jax", "torch"), remat(rows[0] | {"layers": "scan"}), **whole),
        *matmuls(device), *laws(device), Command("speed", ("benchmarks.speed", "--out", "{out}")),
    ])  # fmt: skip


def drift(device: str) -> Suite:
    """As many steps as on a GPU: what the bound on final losses is made from."""
    long = {"device": device, "warmup": 5, "windows": 8, "steps": 5}
    rows = policies(SMALL | {"batch_size": 4}, "bf16", "fp32")
    return Suite("how far 45 steps take equivalent baselines apart", device, 1, [
        *cells("frameworks", ("jax", "torch", *PEERS), rows, **long),
    ])  # fmt: skip


def emulation(device: str) -> Suite:
    rows = policies({"model": "tiny", "batch_size": 16}, "fp32", "tf32", *NARROW)
    return Suite("what it costs a CPU to round to TF32 and to narrower formats", device, 2, [
        *cells("emulation", ("jax", "torch"), rows, device=device, warmup=2, windows=5, steps=2),
    ])  # fmt: skip


def gpu(device: str) -> Suite:
    """On one CUDA GPU; on a CPU, its rehearsal with toys."""
    rehearsal = device == "cpu"
    quick = {"device": device, "warmup": 1, "windows": 2, "steps": 1}
    whole = quick if rehearsal else {"device": device, "warmup": 5, "windows": 8, "steps": 5}
    every = ("bf16", "fp32", "tf32", "fp16")
    toy = TOY | {"batch_size": 4}

    def model(name: str, batch: int) -> Flags:
        return toy if rehearsal else {"model": name, "batch_size": batch}

    gpt2, small, medium = model("gpt2", 32), model("10m", 256), model("30m", 128)
    headline = cells("gpt2", (*OURS, "hf-trainer", "nanogpt", "bare-jax", "accelerate"),
                     policies(gpt2, "bf16"), **whole)  # fmt: skip
    hour = 3600.0
    parity = [
        Command(f"parity-{policy}", (
            "pytest", "parity_tests/ladder/test_ladder.py", "--device", device, "--status", "{out}",
            "-k", f"test_rung[{policy}-{'none' * rehearsal}" + " or long" * (policy == "fp64"),
        ), hour)
        for policy in (POLICIES[:1] if rehearsal else POLICIES)
    ]  # fmt: skip
    power = ["lockstep", "power", "--device", device, "--out", "{out}"]
    return Suite("smoke, parity on CUDA, the tables", device, 1 if rehearsal else 2, [
        Command("doctor", ("lockstep", "doctor"), hour),
        *cells("smoke", OURS + PEERS, policies(toy, *every), **quick),
        *cells("smoke", ("jax", "torch"), policies(toy | {"n_layer": 3}, *NARROW), **quick),
        *parity,
        *headline,
        *cells("gpt2", OURS, policies(gpt2, *every[1:]), **whole),
        *cells("10m", OURS, policies(small, *every), **whole),
        *cells("30m", OURS, policies(medium, *every), **whole),
        *cells("accumulation", OURS, accumulation(gpt2 | {"policy": "bf16"}, 32, (1, 4, 16)),
               **whole),
        *cells("remat", OURS, remat(gpt2 | {"policy": "bf16"}), **whole),
        *matmuls(device, 512 if rehearsal else 8192),
        *laws(device),
        Command("power", tuple(power + ["optax-clip"] * rehearsal)),
    ], limit=hour / 3)  # fmt: skip


def accumulation(base: Flags, rows: int, splits: tuple[int, ...]) -> list[Flags]:
    """So many rows in one optimizer step, as N micro-batches of a N-th each."""
    return [base | {"accum": n, "batch_size": max(1, rows // n)} for n in splits]


def remat(base: Flags) -> list[Flags]:
    return [base | {"remat": mode} for mode in REMAT]


def matmuls(device: str, size: int = 1024) -> list[Task]:
    return [
        Command(f"matmul-{framework}", ("benchmarks.matmul", framework, "--device", device,
                                        "--size", str(size), "--out", "{out}"))
        for framework in ("jax", "torch")
    ]  # fmt: skip


def laws(device: str) -> list[Task]:
    """Each framework in a process of its own."""
    return [
        Command(f"growth-{framework}",
                ("benchmarks.growth", framework, "--device", device, "--out", "{out}"))
        for framework in ("jax", "torch")
    ]  # fmt: skip


SUITES: dict[str, Callable[[str], Suite]] = {
    "smoke": smoke, "cpu": cpu, "drift": drift, "emulation": emulation, "gpu": gpu,
}  # fmt: skip


def argv(task: Command, out: str) -> list[str]:
    return [word.format(out=out) for word in task.words]
