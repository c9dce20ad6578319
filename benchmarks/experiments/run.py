"""An experiment from its expected time to its closing sentence; `benchmarks.run` is its command.

Each arm is a row. Those that are there are not run again, so that an interrupted
experiment goes on where it stopped.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Protocol, cast

from benchmarks import plot
from benchmarks.experiments import (
    accumulation,
    expected,
    formats,
    overflow,
    policies,
    remat,
    when_fp32,
)
from benchmarks.experiments.arm import Arm
from benchmarks.experiments.outcome import Arms
from benchmarks.plot import Panel
from benchmarks.process import measure_apart, relative_path, say
from lockstep import results
from lockstep.exits import STOPPED
from lockstep.process import ONE_THREAD
from lockstep.results import Row
from lockstep.run.runlog import clock


class Experiment(Protocol):
    """What each experiment's module has."""

    WHAT: str

    def arms(self, scale: str, device: str) -> list[Arm]: ...
    def table(self, arms: Arms) -> str: ...
    def sentence(self, arms: Arms) -> str: ...
    def panels(self, arms: Arms) -> list[Panel]: ...


EXPERIMENTS = cast(
    dict[str, Experiment],
    {
        "policies": policies, "accumulation": accumulation, "remat": remat, "overflow": overflow,
        "when-fp32": when_fp32, "formats": formats,
    },
)  # fmt: skip
# On two threads torch waits more than it computes as soon as something else runs: a smoke test
# stays off that.
SCALES: dict[str, dict[str, str]] = {"smoke": ONE_THREAD, "full": {}}
RECORDED = {name: "full" if name == "formats" else "smoke" for name in EXPERIMENTS}  # of a CPU


def row_names(name: str, scale: str, device: str) -> dict[str, Arm]:
    """The name of each arm's row."""
    return {f"{name} {scale} {arm.name}": arm for arm in EXPERIMENTS[name].arms(scale, device)}


def load_arms(name: str, file: Path, scale: str | None = None, device: str | None = None) -> Arms:
    """What is there of them; without a scale at full scale, or else of the smoke test."""
    rows = results.read(file, device)
    for each in [scale] if scale else ["full", "smoke"]:
        found = [rows[row] for row in row_names(name, each, device or "cpu") if row in rows]
        if found:
            break
    return Arms(found)


def describe(name: str, rows: dict[str, Row]) -> str:
    """The table of an experiment's rows, and its closing sentence."""
    arms = Arms(rows.values())
    return f"{EXPERIMENTS[name].table(arms)}\n\n{EXPERIMENTS[name].sentence(arms)}"


def run(name: str, scale: str, device: str, out: Path, again: bool = False) -> int:
    """Returns the exit status; 1 if an arm failed for another reason than memory or support."""
    arms, rows = row_names(name, scale, device), results.read(out, device)
    missing = {
        row: arm for row, arm in arms.items() if again or not is_finished(rows.get(row), arm)
    }
    say(f"{name}: {EXPERIMENTS[name].WHAT}")
    done = len(arms) - len(missing)
    say(f"{scale} scale, {len(arms)} arms on {device}, {done} done; a step of each is timed first")
    try:
        say(expected_time(expected.seconds(list(missing.values()), SCALES[scale])))
        for number, (row, arm) in enumerate(missing.items(), 1):
            say(f"[{number}/{len(missing)}] {arm.name}: {perform(row, arm, out, scale)}")
    except KeyboardInterrupt:
        say("stopped; the same command goes on where it stopped")
        return STOPPED
    found = load_arms(name, out, scale, device)
    finish(name, out, found)
    return int(any(result["status"] == "failed" for result in found.all))


def is_finished(row: Row | None, arm: Arm) -> bool:
    """Whether this very arm has been measured."""
    return row is not None and all(row.get(f) == value for f, value in asdict(arm).items())


def expected_time(seconds: float | None) -> str:
    if seconds is None:
        return "expected time: not known, for not every arm could take a step"
    return f"expected time: about {clock(seconds)}, by a step of each arm"


def perform(name: str, arm: Arm, out: Path, scale: str) -> str:
    """Runs one arm to its end, which puts its row; how it ended, in a line."""
    module, content = "benchmarks.experiments.work", asdict(arm)
    row, seconds = measure_apart(module, content, name, arm.device, out, changes=SCALES[scale])
    ended = "done" if row["status"] == "ok" else f"{row['status']}: {row['why']}"
    return f"{ended}, {seconds:.0f} s"


def finish(name: str, out: Path, arms: Arms) -> None:
    """The table, the picture and the closing sentence."""
    experiment, folder = EXPERIMENTS[name], out.with_suffix("")
    say(f"\n{experiment.table(arms)}\n")
    folder.mkdir(exist_ok=True)
    picture = folder / f"{name}.png"
    drawn = plot.panels(experiment.panels(arms), picture)
    say(f"written: {relative_path(out)}{f' and {relative_path(picture)}' if drawn else ''}\n")
    say(experiment.sentence(arms))
