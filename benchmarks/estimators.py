"""`python -m benchmarks.estimators`: others' estimates of a step's peak memory beside ours.

torch's MemTracker runs the very step of `torch_ref.train`, on fake CUDA tensors. accelerate's
formula is that of its `estimate-memory` (`estimate_training_usage`, of a batch of 1); Megatron's
that of Korthikanti et al. 2022 (arXiv:2205.05198): 34 bytes for each number of a block's input in
16 bit without the scores, its input alone where it is recomputed, 16 bytes a parameter. MaxText has
no formula: it compiles the program, as `lockstep compile` does.
"""

import json
import subprocess
import sys
from contextlib import closing
from typing import Any

from benchmarks import tables
from benchmarks.compiled import FOLDER, is_current
from lockstep import devices, results
from lockstep.compile.ask import Compiler
from lockstep.config import Config, from_flags
from lockstep.config.policy import BYTES
from lockstep.errors import UserError
from lockstep.exits import DONE, exit_status
from lockstep.flags import Parser
from lockstep.plan import memory, shape
from lockstep.plan.setting import Setting, backend
from lockstep.process import last_line

FILE = FOLDER / "estimators.jsonl"
DEVICE = "h100"
CELLS = [
    {"model": model, "batch_size": rows, "policy": policy, "remat": remat}
    for model, rows in (("gpt2", 8), ("gpt2", 64), ("125m", 8))
    for policy, remat in (("bf16", "none"), ("bf16", "block"), ("fp32", "none"))
    if policy == "bf16" or (model, rows) == ("gpt2", 8)
]
COLUMNS = {
    "torch": "torch, traced", "tracker": "MemTracker", "plan torch": "plan", "jax": "JAX, compiled",
    "plan jax": "plan", "accelerate": "accelerate", "megatron": "Megatron",
}  # fmt: skip


def names() -> dict[str, dict[str, Any]]:
    """Name of a row -> its cell."""
    return {"{model}, B = {batch_size}, {policy}, {remat}".format(**cell): cell for cell in CELLS}


def accelerate(model: shape.Shape, config: Config) -> float:
    """The largest of weights, gradients, moments and update; in float32 they are there at once."""
    return BYTES["float32"] * model.weights * (2 if config.precision.roles.mixed else 4)


def megatron(model: shape.Shape, config: Config) -> float | None:
    """None in float32, of which it says nothing."""
    if not config.precision.roles.mixed:
        return None
    tokens = config.optim.batch_size * model.context
    each = 34 if config.execution.remat == "none" else 2
    return 16 * model.weights + tokens * (each * model.n_layer * model.d_model + 4 * model.vocab)


def ours(model: shape.Shape, config: Config, framework: str) -> float:
    how = Setting(
        framework=framework, backend=backend(devices.find(DEVICE)), roles=config.precision.roles,
        remat=config.execution.remat, rows=config.optim.batch_size,
    )  # fmt: skip
    return memory.state_bytes(model, how.roles) + memory.step_bytes(model, how)


def tracker(config: Config) -> float:
    """In a process of its own: torch takes fake CUDA tensors for real from its import on."""
    words = ["benchmarks.estimators_tracker", json.dumps(config.to_json())]
    done = subprocess.run([sys.executable, "-m", *words], text=True, capture_output=True)
    if done.returncode:
        why = last_line(done.stderr) or f"its process ended with status {done.returncode}"
        raise UserError(f"MemTracker: {why}")
    return float(done.stdout)


def measure(cell: dict[str, Any], compilers: dict[str, Compiler]) -> dict[str, Any]:
    scan = {"layers": "scan"} if cell["remat"] != "none" else {}
    config = from_flags({**cell, **scan, "steps": 1}, accelerator=True)
    peaks = {name: each.program(config, DEVICE).peak for name, each in compilers.items()}
    return {"cell": cell, **peaks, "tracker": tracker(config)}


def with_formulas(row: dict[str, Any]) -> dict[str, Any]:
    config = from_flags({**row["cell"], "steps": 1}, accelerator=True)
    model = shape.of_model(config.model)
    return {
        **row, "plan torch": ours(model, config, "torch"), "plan jax": ours(model, config, "jax"),
        "accelerate": accelerate(model, config), "megatron": megatron(model, config),
    }  # fmt: skip


def markdown(stored: dict[str, results.Row]) -> str:
    """GB, and of an estimate what it is off by."""
    rows = []
    for name, row in stored.items():
        found, cells = with_formulas(row), [name]
        for column in COLUMNS:
            value, truth = found[column], found["jax" if column == "plan jax" else "torch"]
            text = "" if value is None else f"{value / 1e9:.2f}"
            if value is not None and column not in ("torch", "jax"):
                text += f" ({value / truth - 1:+.1%})"
            cells.append(text)
        rows.append(cells)
    return tables.markdown(["GB", *COLUMNS.values()], rows)


def main(argv: list[str] | None = None) -> int:
    """The command line, which takes no words."""
    Parser(prog="python -m benchmarks.estimators", description=__doc__).parse_args(argv)
    known = results.read(FILE)
    with closing(Compiler("torch")) as torch, closing(Compiler("jax")) as jax:
        compilers = {"torch": torch, "jax": jax}
        for name, cell in names().items():
            if not is_current(known.get(name)):
                results.put(FILE, [results.row(name, DEVICE, **measure(cell, compilers))])
    print(markdown(results.read(FILE)))
    return DONE


if __name__ == "__main__":
    sys.exit(exit_status(main))
