"""`lockstep plan --device cpu --measure`: no formula knows a CPU, so its candidates are timed."""

import argparse
from typing import Any

from lockstep.config import PRESETS
from lockstep.errors import require
from lockstep.plan import timing, trainer
from lockstep.plan.recommend import ALL_AT_ONCE
from lockstep.plan.setting import Setting
from lockstep.plan.shape import Shape

CPU = "cpu"
# Policy and remat. float16 is never faster than bfloat16 on a CPU, and TF32 is emulated there.
CANDIDATES = (("fp32", "none"), ("bf16", "none"), ("bf16", "block"))
ROWS = 8  # of a micro-batch, where none is given


def check(given: argparse.Namespace) -> None:
    """
    Raises:
        UserError: a flag that asks for what only formulas, or a compiler, could say.
    """
    remedy = "a CPU's memory and time are not predicted; add --measure, which times them here"
    require(given.measure, "--device", given.device, remedy)
    for name in ("memory", "devices", "policy", "remat"):
        value = getattr(given, name)
        require(not value, f"--{name}", value, f"is not for --device {CPU}; drop it")
    require(given.model in PRESETS, "--model", given.model, "only a preset can be trained here")


def plan(given: argparse.Namespace, shape: Shape, framework: str) -> dict[str, Any]:
    """Measures a framework's candidates; returns them and the fastest, as JSON."""
    rows = given.micro_batch or ROWS
    accum = -(-(given.tokens_per_step or 1) // (rows * shape.context))
    found: list[dict[str, Any]] = []
    for policy, remat in CANDIDATES:
        setting = Setting(framework=framework, ampere=False, policy=policy, remat=remat, rows=rows,
                          accum=accum, loss_chunks=given.loss_chunks or ALL_AT_ONCE)  # fmt: skip
        words = trainer.command(given, setting)
        row = {"policy": policy, "remat": remat, "rows": rows, "accum": accum, "command": words}
        found.append(row | timing.measure(words))
    result: dict[str, Any] = {"framework": framework, "measured": found, "recommended": None}
    able = [row for row in found if "failed" not in row]
    if able:
        best = max(able, key=lambda row: row["tokens_per_second"])
        result |= {"recommended": best, "command": best["command"]}
        result |= trainer.run_cost(given, best["tokens_per_second"])
    return result
