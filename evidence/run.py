"""`make evidence`: measures what the documents show and today's code has not measured.

The same call goes on where it was stopped: rows that are there are not measured again. Most
commands put each row as it is measured; that of the memory cells is one row, and the worlds' come
at the end, so these begin anew. Parts whose figures are not times are measured side by side, one
for each core; then the others, alone.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from evidence.parts import PARTS, Part
from lockstep.errors import require
from lockstep.exits import STOPPED
from lockstep.process import ROOT, git_commit
from lockstep.run.runlog import clock

# What follows from the rows: fits that `lockstep plan` reads, then the documents.
AFTER = ("python -m benchmarks.fit", "python -m benchmarks.plan",
         "python -m evidence tables")  # fmt: skip
PROGRAMS = {"python": [], "pytest": ["-m", "pytest"], "lockstep": ["-m", "lockstep"]}


class Estimate(NamedTuple):
    """By the durations that the rows of the last run have."""

    seconds: float
    unknown: int  # units of which no duration is known

    def __str__(self) -> str:
        known = f"about {clock(self.seconds)}"
        return known + (f", and {self.unknown} of unknown duration" if self.unknown else "")


def estimate(part: Part, units: list[str]) -> Estimate:
    seconds, unknown, found = 0.0, 0, part.found()
    for unit in units:
        times = [row["measured"]["seconds"] for row in found[unit]]
        if not times or None in times:
            unknown += 1
        else:
            seconds += sum(times)
    return Estimate(seconds, unknown)


def run(names: list[str], say: Callable[[str], None], *, listing: bool = False,
        parts: list[Part] = PARTS, after: tuple[str, ...] = AFTER) -> int:  # fmt: skip
    """Measures the parts of these names, or all; the exit status, 1 if a part is not finished.

    Args:
        listing: says what would be run, and runs nothing.
    """
    known = [part.name for part in parts]
    for name in names:
        require(name in known, "NAME", name, f"unknown; use {', '.join(known)}")
    wanted = [part for part in parts if not names or part.name in names]
    chosen = [part for part in wanted if not part.needs]
    missing = {part.name: part.unfinished() for part in chosen}
    times = {part.name: estimate(part, missing[part.name]) for part in chosen}
    whole = Estimate(*map(sum, zip((0.0, 0), *times.values())))
    say(f"{sum(map(len, missing.values()))} units of {len(chosen)} parts to measure: {whole}")
    if "+" in git_commit():
        say("the working tree has changes: of its rows nobody can tell what has changed since")
    for part in chosen:
        units, left = len(list(part.units())), len(missing[part.name])
        say(f"  {part.name:22}{left:>4} of {units:<4}" + (f" {times[part.name]}" if left else ""))
    for part in wanted:
        if part.needs:
            say(f"  {part.name:22}not run here, needs {part.needs}: {part.call()}")
    if listing:
        return 0
    due = [part for part in chosen if missing[part.name]]
    try:
        failed = [part.name for part, finished in measure_all(due, say) if not finished]
        for command in after:
            say(command)
            if start(command):
                failed.append(command)
    except KeyboardInterrupt:
        say("stopped; the same command goes on where it stopped")
        return STOPPED
    for each in failed:
        say(f"not finished: {each}")
    return int(bool(failed))


def measure_all(parts: list[Part], say: Callable[[str], None]) -> Iterator[tuple[Part, bool]]:
    """Each part, and whether nothing of it is missing then."""
    beside = [part for part in parts if not part.alone]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            yield from zip(beside, pool.map(lambda part: measure(part, say), beside))
        except KeyboardInterrupt:  # the terminal has sent it to each command, too
            pool.shutdown(cancel_futures=True)
            raise
    for part in parts:
        if part.alone:
            yield part, measure(part, say)


def measure(part: Part, say: Callable[[str], None]) -> bool:
    """Runs a part's command for what is missing; whether nothing is missing then."""
    units = part.unfinished()
    if not units:  # another part's command has measured them, too
        return True
    everything = len(units) == len(list(part.units()))
    command = part.call([] if everything else units)
    say(f"{part.name}: {command}")
    status = start(command)
    left = part.unfinished()
    say(f"{part.name}: status {status}, {len(units) - len(left)} of {len(units)} measured")
    return not left


def start(command: str) -> int:
    program, *words = shlex.split(command)
    process = subprocess.Popen([sys.executable, *PROGRAMS[program], *words], cwd=ROOT)
    try:
        return process.wait()
    except KeyboardInterrupt:  # it ends by itself, with all that it has started
        process.wait()
        raise
