"""`lockstep specificity`: the false-positive rate of the ladder on correct programs.

Fresh seeds and semantics-preserving variants of one twin: all must be equal.
The largest figure of each rule is kept beside its tolerance.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from lockstep import results
from lockstep.errors import require
from lockstep.judge.verdict import Finding, Verdict
from lockstep.parity import matrix, power
from lockstep.parity.case import Case
from lockstep.parity.catalogue import REWRITES
from lockstep.parity.ladder import RUNGS, climb
from lockstep.parity.pair import gpt
from lockstep.parity.side import Side, closing_all
from lockstep.parity.toy import require_devices

SEEDED = ("fp64", "fp32", "bf16", "fp16")  # fresh seeds under a policy
PARTS = (*SEEDED, "rewrites")
CURVES = 8  # the rung that is tried with most seeds
POLICIES, NUMERIC_RUNGS = ("fp64", "fp32", "bf16"), {2, 3, 4, 8}  # of rewrites
# One of each family; scanned and unrolled layers, with remat and without. Small: many are run.
ROWS: tuple[matrix.Row, ...] = (
    {"model": "tiny", "layers": "unroll", "remat": "none", "accum": 2, "steps": 24},
    {"model": "gpt2", "layers": "scan", "remat": "block", "accum": 2, "steps": 24},
)


class AlarmRecord:
    """A record of climbs, false alarms, and the figure nearest to each bound."""

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


def run(
    names: list[str],
    seeds: int,
    curve_seeds: int,
    device: str,
    out: Path | None,
    say: Callable[[str], None],
) -> bool:
    """Prints the tried cases and each false alarm; returns whether there was none.

    Args:
        names: of `PARTS`; none stands for all. The other parts of `out` stay.
        seeds: for every rung.
        curve_seeds: for rung 8.
    """
    for name in names:
        require(name in PARTS, "PART", name, f"unknown; use {', '.join(PARTS)}")
    others = power.healthy()
    quiet = True
    with closing_all(others.values()):
        require_devices(others.values(), device)
        for name in names or PARTS:
            record, began = AlarmRecord(), time.perf_counter()
            for tried in cases(name, seeds, curve_seeds, others, device):
                _climb(*tried, record, say)
            climbs = sum(cell["climbs"] for row in record.rungs.values() for cell in row.values())
            say(f"{name}: {len(record.alarms)} false alarms in {climbs} climbs")
            quiet &= not record.alarms
            if out:
                results.put(out, _rows(name, record, device, time.perf_counter() - began))
                say(f"written: {out}")
            for side in others.values():
                side.forget()
    return quiet


def _rows(part: str, record: AlarmRecord, device: str, seconds: float) -> list[results.Row]:
    """Makes a row for each rung and policy; they share the part's time evenly."""
    cells = [(rung, policy, cell) for rung, row in record.rungs.items()
             for policy, cell in row.items()]  # fmt: skip
    return [
        results.row(
            f"{part} {rung} {policy}", device, seconds / len(cells), part=part, rung=int(rung),
            policy=policy, **cell,
            alarms=[a for a in record.alarms if (str(a["rung"]), a["policy"]) == (rung, policy)],
        )
        for rung, policy, cell in cells
    ]  # fmt: skip


def _climb(
    what: str, case: Case, numbers: set[int], record: AlarmRecord, say: Callable[[str], None]
) -> None:
    began, policy = time.perf_counter(), case.config.precision.policy
    for rung in RUNGS:
        if rung.number in numbers and not rung.not_run(case):
            before = len(record.alarms)
            record.add(rung.number, policy, what, climb(rung, case).findings)
            for alarm in record.alarms[before:]:
                say(f"rung {rung} under {policy}, {what}: {alarm['said']}")
    say(f"{policy}, {what}: {time.perf_counter() - began:.0f} s")


Cases = Iterator[tuple[str, Case, set[int]]]


def cases(part: str, seeds: int, curve_seeds: int, others: dict[str, Side], device: str) -> Cases:
    """Lists the cases that are tried, and their rungs."""
    if part == "rewrites":
        yield from _rewritten(others, device)
        return
    every, (a, b) = {rung.number for rung in RUNGS}, others.values()
    last = seeds if part == "fp64" else max(seeds, curve_seeds)  # its curves have one bound only
    for family, row in enumerate(ROWS):
        config = matrix.config({**row, "policy": part}, device)
        for seed in range(family, last, len(ROWS)):  # the families take turns
            case = Case(pair=gpt(row), a=a, b=b, config=config, seed=seed)
            yield f"{row['model']}, seed {seed}", case, every if seed < seeds else {CURVES}


def _rewritten(others: dict[str, Side], device: str) -> Cases:
    """Lists rewritten programs under every policy; the families take turns."""
    turns = itertools.cycle(ROWS)
    for framework, name in [(side, name) for side, names in REWRITES.items() for name in names]:
        with closing(others[framework].mutant(name)) as sick:
            for policy, row in zip(POLICIES, turns):
                case = power.against(sick, others, {**row, "policy": policy}, device)
                yield f"{row['model']}, {framework} with {name}", case, NUMERIC_RUNGS
