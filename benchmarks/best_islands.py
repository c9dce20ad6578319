"""`python -m benchmarks.best_islands`: what `--fp32-islands auto --budget 5%` chooses, beside each
kind of modules alone and beside the greedy choice of other weights and batches, which are measured.

In PyTorch, which compiles nothing. One row: sets of islands, the gradient's error with each under
both seeds, and the time of a step.
"""

import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.tables import markdown
from lockstep import results, twin
from lockstep.config import Config, from_flags
from lockstep.exits import DONE, exit_status
from lockstep.flags import Parser
from lockstep.parity import sensitivity
from lockstep.parity.best_islands import Goal, Item, meter, shorten
from lockstep.parity.side import Side
from lockstep.process import ROOT

FILE = ROOT / "docs" / "results" / "best_islands.jsonl"
FRAMEWORK = "torch"
BUDGET = 0.05
SEEDS = (0, 1)  # chosen by, held out
GREEDY = "greedy, of the held-out seed"


def greedy(items: Sequence[Item], budget: float) -> str:
    """Of what fits, always that which removes most for its time: the patterns."""
    chosen: list[str] = []
    left = budget
    for item in sorted(items, key=lambda each: -each.removed / max(each.time, 1e-4)):
        if item.removed > 0 and max(0.0, item.time) <= left:
            chosen, left = [*chosen, item.pattern], left - max(0.0, item.time)
    return ",".join(chosen)


def measure(side: Side, config: Config) -> list[dict[str, Any]]:
    """The sets, and what was measured of each."""
    cases = [sensitivity.strict_case(side, side, config, seed) for seed in SEEDS]
    mine, other = (meter(side, case, config) for case in cases)
    sets = {"none": "", "auto": mine.choose(Goal(budget=BUDGET)).patterns,
            GREEDY: greedy(other.items, BUDGET)}  # fmt: skip
    found = []
    for name, patterns in sets.items():
        short = shorten(patterns, config.model.matmuls)
        each = [which.measure(patterns) for which in (mine, other)]
        found.append({"name": name, "patterns": short, "time": each[0].time,
                      "errors": [one.error for one in each]})  # fmt: skip
    for ours, theirs in zip(mine.kinds, other.kinds, strict=True):
        found.append({"name": "a kind", "patterns": ours.patterns, "time": ours.time,
                      "errors": [ours.error, theirs.error]})  # fmt: skip
    return found


def table(rows: dict[str, results.Row]) -> str:
    head = ["choice", "islands", "step time", "gradient's error", "the same, held out"]
    return markdown(head, [
        [each["name"], f"`{each['patterns']}`" if each["patterns"] else "",
         f"{each['time']:+.1%}" + " (over the budget)" * (each["time"] > BUDGET),
         *(f"{error:.2e}" for error in each["errors"])]
        for row in rows.values() for each in row["sets"]
    ])  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = Parser(prog="python -m benchmarks.best_islands", description=__doc__)
    parser.add_argument("--out", metavar="FILE", type=Path, default=FILE, help="where rows go")
    given = parser.parse_args(argv)
    config = from_flags(sensitivity.DEFAULTS | {"policy": "bf16"}, accelerator=False)
    side, began = Side(FRAMEWORK, twin.MODULES[FRAMEWORK], remember=False), time.perf_counter()
    with closing(side):
        sets = measure(side, config)
    row = results.row(FRAMEWORK, "cpu", time.perf_counter() - began, sets=sets)
    results.put(given.out, [row])
    print(table(results.read(given.out)))
    return DONE


if __name__ == "__main__":
    sys.exit(exit_status(main))
