"""`lockstep specificity`: how often the ladder takes a correct program for a wrong one.

Harmless rewrites of one twin, rows and micro-batches in another order, and fresh seeds: all must
stay green. What each rung's figure came to at worst is kept beside its bound.
"""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lockstep.parity import matrix, power, provenance
from lockstep.parity.bugs import REWRITES
from lockstep.parity.case import Case
from lockstep.parity.ladder import RUNGS, climb
from lockstep.parity.pair import GPT
from lockstep.parity.side import Side
from lockstep.parity.verdict import Finding, Verdict

POLICIES = ("fp64", "fp32", "bf16", "fp16")
CURVES = 8  # the rung that is tried with most seeds
REWRITE_POLICIES, REWRITE_RUNGS = ("fp64", "fp32", "bf16"), {2, 3, 4, 8}
# One of each family; scanned and unrolled layers, two modes of remat. Short: many are run.
ROWS: tuple[matrix.Row, ...] = (
    {"model": "tiny", "layers": "unroll", "remat": "block", "accum": 2, "steps": 40},
    {"model": "gpt2", "layers": "scan", "remat": "sqrt", "accum": 2, "steps": 40},
)


class Record:
    """Climbs, false alarms, and the figure that came nearest to each bound."""

    def __init__(self) -> None:
        self.rungs: dict[str, dict[str, dict[str, Any]]] = {}
        self.alarms: list[dict[str, Any]] = []

    def add(self, rung: int, policy: str, what: str, findings: list[Finding]) -> None:
        cell = self.rungs.setdefault(str(rung), {}).setdefault(
            policy, {"climbs": 0, "false_alarms": 0, "worst": {}}
        )
        cell["climbs"] += 1
        wrong = [f for f in findings if f.verdict is not Verdict.EQUAL]
        cell["false_alarms"] += bool(wrong)
        if wrong:
            worst = max(wrong, key=lambda f: f.share)
            self.alarms.append({"rung": rung, "policy": policy, "what": what, "said": str(worst)})
        for finding in findings:
            held = cell["worst"].get(finding.rule)
            if held is None or finding.share > held["share"]:
                cell["worst"][finding.rule] = {
                    "figure": finding.figure, "bound": finding.bound, "share": finding.share,
                    "where": f"{what}: {finding.where}",
                }  # fmt: skip


def run(seeds: int, curve_seeds: int, device: str, out: Path | None,
        say: Callable[[str], None]) -> bool:  # fmt: skip
    """Prints what was tried and each false alarm; returns whether there was none."""
    record = Record()
    others = power.healthy()
    try:
        for what, case, numbers in cases(seeds, curve_seeds, others, device):
            began = time.perf_counter()
            for rung in RUNGS:
                if rung.number in numbers and not rung.not_run(case):
                    policy = case.config.precision.policy
                    before = len(record.alarms)
                    record.add(rung.number, policy, what, climb(rung, case).findings)
                    for alarm in record.alarms[before:]:
                        say(f"rung {rung} under {policy}, {what}: {alarm['said']}")
            seconds = time.perf_counter() - began
            say(f"{case.config.precision.policy}, {what}: {seconds:.0f} s")
    finally:
        for side in others.values():
            side.close()
    climbs = sum(cell["climbs"] for cells in record.rungs.values() for cell in cells.values())
    say(f"{len(record.alarms)} false alarms in {climbs} climbs")
    if out:
        content = provenance.about(device) | {
            "seeds": seeds, "curve_seeds": curve_seeds,
            "rewrites": [f"{framework}: {name}" for framework, name in named_rewrites()],
            "rungs": record.rungs, "alarms": record.alarms,
        }  # fmt: skip
        out.write_text(json.dumps(content, indent=1) + "\n")
        say(f"written: {out}")
    return not record.alarms


def named_rewrites() -> list[tuple[str, str]]:
    return [(framework, name) for framework, names in REWRITES.items() for name in names]


Cases = Iterator[tuple[str, Case, set[int]]]


def cases(seeds: int, curve_seeds: int, others: dict[str, Side], device: str) -> Cases:
    """What is tried, and by which rungs."""
    every = {rung.number for rung in RUNGS}
    a, b = others.values()
    for policy in POLICIES:
        for family, row in enumerate(ROWS):
            config = matrix.config({**row, "policy": policy}, device)
            for seed in range(
                family, max(seeds, curve_seeds), len(ROWS)
            ):  # the families take turns
                numbers = every if seed < seeds else {CURVES}
                if seed < seeds or (seed < curve_seeds and policy != "fp64"):
                    case = Case(pair=GPT, a=a, b=b, config=config, seed=seed)
                    yield f"{row['model']}, seed {seed}", case, numbers
            for side in (a, b):
                side.answers.clear()
    for framework, name in named_rewrites():
        sick = Side(framework, GPT.modules[framework], variant=name, small=True)
        try:
            for row in ROWS:
                for policy in REWRITE_POLICIES:
                    case = power.against(sick, others, {**row, "policy": policy}, device)
                    yield f"{row['model']}, {framework} with {name}", case, REWRITE_RUNGS
        finally:
            sick.close()
