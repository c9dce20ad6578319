"""`lockstep runs`: lists the runs in a folder, compares two, deletes old checkpoints."""

import argparse
import sys
from pathlib import Path
from typing import Any

from lockstep.errors import UserError, printable, require
from lockstep.exits import DONE
from lockstep.flags import add_command, add_switch
from lockstep.monitor import history, listing, prune
from lockstep.monitor.history import History
from lockstep.monitor.prune import Surplus
from lockstep.run import directory


def add(commands: Any) -> None:
    """Adds the subcommand."""
    sub = add_command(
        commands, "runs", _runs,
        "Lists the runs in a folder: running, finished, stopped (its last step is\n"
        "saved) or dead. With --compare two of them side by side.",
        "lockstep runs --compare jax-tiny-bf16 torch-tiny-fp16",
    )  # fmt: skip
    sub.add_argument("dir", metavar="DIR", nargs="?", default=str(directory.RUNS),
                     help=f"a folder of runs (default: {directory.RUNS})")  # fmt: skip
    sub.add_argument("--compare", metavar=("A", "B"), nargs=2,
                     help="show how two runs' settings and losses differ; names in "
                     "DIR, or paths (default: list)")  # fmt: skip
    about = "delete checkpoints but each run's best, last good and later ones; asks before it "
    add_switch(sub, "--prune", f"{about}deletes")
    add_switch(sub, "--yes", "--prune deletes without asking")


def _runs(given: argparse.Namespace) -> int:
    folder = Path(given.dir)
    require(given.prune or not given.yes, "--yes", "alone", "is for --prune; add it")
    require(not (given.prune and given.compare), "--prune", "--compare", "drop one")
    if given.compare:
        lines = compare(*[history.read(_find(folder, name), name) for name in given.compare])
        print(*map(printable, lines), sep="\n")
    elif given.prune:
        _prune(folder, given.yes)
    else:
        _list(folder)
    return DONE


def _find(folder: Path, name: str) -> Path:
    inside = folder / name
    return inside if directory.is_run(inside) else Path(name)


def _list(folder: Path) -> None:
    rows: list[list[str]] = []
    for run in listing.find(folder):
        try:
            rows.append(listing.summarize(run))
        except UserError as error:
            rows.append([printable(run.name), *[""] * (len(listing.HEAD) - 2), "unreadable"])
            print(error, file=sys.stderr)
    print(*listing.in_columns([listing.HEAD, *rows] if rows else [["no runs"]]), sep="\n")


def compare(a: History, b: History) -> list[str]:
    """Compares two runs' settings, and finds where their losses part."""
    rows = [["setting", a.name, b.name], *([n, *v] for n, v in history.differences([a, b]))]
    lines = listing.in_columns(rows) if len(rows) > 1 else ["their settings are the same"]
    lines += history.describe_parting(history.part(a, b))
    if not history.are_one_experiment(a.config, b.config):
        return [
            *lines,
            "the runs differ in model, data or optimizer settings, so their curves need not match",
        ]
    return [*lines, "to test whether the gap is rounding, run: lockstep curves A B"]


def _prune(folder: Path, yes: bool) -> None:
    found: list[Surplus] = []
    for run in listing.find(folder):
        try:
            found.append(prune.find_surplus(run))
        except UserError as error:  # it is being trained, or unreadable
            print(f"left alone: {error}", file=sys.stderr)
    found = [surplus for surplus in found if surplus.paths]
    for surplus in found:
        for path in surplus.paths:
            print(printable(str(path)))
    count, size = sum(len(s.paths) for s in found), sum(s.size for s in found)
    what = f"{count} checkpoints, {size / 1e6:,.1f} MB"
    if not count:
        print("nothing to delete")
    elif yes or (can_answer() and input(f"delete {what}? [y/N] ").strip().lower() in ("y", "yes")):
        for surplus in found:
            prune.remove(surplus)
        print(f"deleted: {what}")
    else:
        print(f"nothing is deleted; --yes deletes {what}")


def can_answer() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()
