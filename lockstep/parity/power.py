"""`lockstep power`: which rung catches which planted bug, and how small a bug can be.

A ladder that has never failed has proven nothing. Each bug is planted in a fresh process of its
twin, and every rung that can stand in its configuration is climbed against the healthy other one.
The sound pair climbs the rung that must catch it under the same flags: a difference counts only
beside "equal".
"""

import sys
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

from lockstep import results
from lockstep.errors import UserError
from lockstep.judge.verdict import Verdict
from lockstep.parity import catalogue, matrix
from lockstep.parity.case import Case
from lockstep.parity.catalogue import Bug
from lockstep.parity.ladder import RUNGS, Rung, climb, verdict
from lockstep.parity.pair import GPT, gpt
from lockstep.parity.side import Side, closing_all
from lockstep.parity.toy import require_devices
from lockstep.process import ONE_THREAD

STEPS = 24  # of a whole run: what a bug does to a curve it does early
CRASH = "crash"  # the sick process ended: the bug itself is broken, nothing was caught
PROBES = (2, 3, 4, 8)  # the rungs by which the size of a graded bug is judged
GRADES = {  # the five whose smallest size is looked for, and what that size is
    "norm-eps": "the norms' epsilon: its distance from 1e-5",
    "softmax-scale": "the scores: relative",
    "decay": "weight decay: relative",
    "learning-rate": "learning rate: relative",
    "mask-probability": "the masks' probability: absolute",
}
SMALLEST = 48  # halvings of 1/4


def healthy() -> dict[str, Side]:
    return {
        framework: Side(framework, module, environment=ONE_THREAD)
        for framework, module in GPT.modules.items()
    }


def against(sick: Side, others: dict[str, Side], row: dict[str, Any], device: str) -> Case:
    """Puts the sound twin first: it gives oracle, trained weights and envelope."""
    (other,) = (side for name, side in others.items() if name != sick.framework)
    steps = {} if "mesh" in row else {"steps": STEPS}
    config = matrix.config({**steps, **row}, device)
    return Case(pair=gpt(row), a=other, b=sick, config=config)


def caught(case: Case, rungs: Iterable[Rung]) -> dict[str, str]:
    """Returns rung number -> verdict, for the rungs that apply here."""
    verdicts: dict[str, str] = {}
    for rung in rungs:
        if not rung.not_run(case):
            try:
                verdicts[str(rung.number)] = str(verdict(rung, case))
            except UserError as error:
                print(error, file=sys.stderr)
                verdicts[str(rung.number)] = CRASH
    return verdicts


def examine(bug: Bug, others: dict[str, Side], device: str, rungs: list[Rung]) -> dict[str, str]:
    """Climbs rungs with one bug: a verdict for each."""
    with closing(others[bug.framework].mutant(bug.name)) as sick:
        return caught(against(sick, others, bug.flags, device), rungs)


def examine_sound(bug: Bug, others: dict[str, Side], device: str) -> Verdict:
    """Climbs the rung that must catch a bug with the sound pair, under the same flags."""
    case = against(others[bug.framework], others, bug.flags, device)
    return climb(RUNGS[bug.rung - 1], case).verdict


def control_name(bug: Bug) -> str:
    """Names the rung and the flags under which the sound pair must be equal."""
    flags = (f"{name}={value}" for name, value in sorted(bug.flags.items()))
    return " ".join([str(bug.rung), *flags])


def smallest(name: str, policy: str, others: dict[str, Side], device: str) -> float | None:
    """Finds the smallest size, to a factor of 2, that some rung calls different, or None."""
    bug = catalogue.BY_NAME[name]
    row = {**bug.flags, "policy": policy, "accum": 1, "remat": "none"}
    if policy != "fp64":
        row["dropout"] = 0.0

    def seen(halvings: int) -> bool:
        size = 0.25 / 2**halvings
        given = 1e-5 + size if name == "norm-eps" else size
        variant = f"{name}={given!r}"
        with closing(others[bug.framework].mutant(variant, remember=False)) as sick:
            case = against(sick, others, row, device)
            probes = (RUNGS[number - 1] for number in PROBES)
            return any(Verdict.DIFFERENT in caught(case, [rung]).values() for rung in probes)

    if not seen(0):
        return None
    low, high = 0, SMALLEST + 1  # seen, and taken for not seen
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if seen(middle) else (low, middle)
    return 0.25 / 2**low


def run(names: list[str], device: str, out: Path | None, say: Callable[[str], None]) -> bool:
    """Prints the table as it grows; returns whether all went as expected.

    Every bug must be caught by its rung, and the sound pair must be equal there.
    """
    chosen = [catalogue.find(name) for name in names] or catalogue.BUGS
    others = healthy()
    complete, sound = True, dict[str, Verdict]()
    with closing_all(others.values()):
        require_devices(others.values(), device)
        say(f"{'bug':28}" + "".join(f"{rung.number:>3}" for rung in RUNGS))
        for bug in chosen:
            began = time.perf_counter()
            verdicts = examine(bug, others, device, RUNGS)
            control = control_name(bug)
            if control not in sound:
                sound[control] = examine_sound(bug, others, device)
            seconds = time.perf_counter() - began
            missed = verdicts.get(str(bug.rung)) != Verdict.DIFFERENT
            complete &= not missed and sound[control] is Verdict.EQUAL
            marks = "".join(f"{mark(verdicts.get(str(rung.number))):>3}" for rung in RUNGS)
            said = f"   rung {bug.rung} missed it" if missed else ""
            if sound[control] is not Verdict.EQUAL:
                said += f"   rung {bug.rung} says {sound[control]} of the sound pair"
            say(f"{bug.name:28}{marks}{said}")
            _put(out, results.row(bug.name, device, seconds, verdicts=verdicts))
    return complete


def grade(device: str, out: Path | None, say: Callable[[str], None]) -> None:
    """Prints the smallest detected size of each graded bug."""
    others = healthy()
    with closing_all(others.values()):
        require_devices(others.values(), device)
        for name, unit in GRADES.items():
            # Only float64 has dropout here (see matrix.config).
            for policy in ("fp64",) if name == "mask-probability" else ("fp64", "fp32", "bf16"):
                began = time.perf_counter()
                size = smallest(name, policy, others, device)
                found = {"bug": name, "policy": policy, "unit": unit, "size": size}
                seconds = time.perf_counter() - began
                say(f"{name} under {policy}: {f'{size:.1e}' if size else 'not seen at 0.25'}")
                _put(out, results.row(f"{name} {policy}", device, seconds, **found))


def _put(out: Path | None, row: results.Row) -> None:
    if out:
        results.put(out, [row])


def mark(verdict: str | None) -> str:
    """Marks a verdict: x caught, ? inconclusive, . not caught, ! crashed, empty: does not apply."""
    marks = {None: "", "equal": ".", "inconclusive": "?", CRASH: "!", "different": "x"}
    return marks[verdict]
