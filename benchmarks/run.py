"""`python -m benchmarks.run SUITE`: every cell in a fresh process, then the report.

What is there already is not measured again, so an interrupted suite goes on where it stopped.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks import report
from benchmarks.cells import Cell
from benchmarks.measure import write
from benchmarks.suites import SUITES, Command, Suite, Task, argv
from lockstep.errors import UserError, require
from lockstep.flags import Parser, reader
from lockstep.parity import provenance

ROOT = Path(__file__).resolve().parent.parent
INTERRUPTED = 130


class Job(NamedTuple):
    """A task, and the file that its result goes to."""

    task: Task
    out: Path

    @property
    def device(self) -> str:
        return self.task.device if isinstance(self.task, Cell) else ""


def jobs(suite: Suite, out: Path) -> list[Job]:
    """Round after round, so that A is measured before and after B; a command only once."""
    listed = []
    for number in range(1, suite.rounds + 1):
        for task in suite.tasks:
            if isinstance(task, Cell):
                listed.append(Job(task, out / "cells" / f"{task.name}.{number}.json"))
            elif number == 1:
                listed.append(Job(task, out / f"{task.name}.json"))
    return listed


def run(suite: Suite, out: Path, minutes: float) -> int:
    """Returns the exit status."""
    (out / "cells").mkdir(parents=True, exist_ok=True)
    every = jobs(suite, out)
    missing = [job for job in every if not job.out.exists()]
    say(f"{suite.what}: {len(every)} jobs on {suite.device}, {len(every) - len(missing)} done")
    status, began = 0, time.perf_counter()
    try:
        for number, job in enumerate(missing):
            spent = time.perf_counter() - began
            if spent > 60 * minutes:
                say(f"{minutes:g} minutes are over; the same command goes on with the rest")
                break
            left = f"ETA {spent / number * (len(missing) - number) / 60:.0f} min" if number else ""
            say(f"[{number + 1}/{len(missing)}] {job.out.stem} {left}".rstrip())
            say(f"    {perform(job)}")
    except KeyboardInterrupt:
        say("stopped; the same command goes on where it stopped")
        status = INTERRUPTED
    say(f"report: {report.write(out)}")
    return status


def perform(job: Job) -> str:
    """Runs one job to its end; what came of it, in a line."""
    before, out = time.perf_counter(), shown(job.out)
    if isinstance(job.task, Command):
        code = subprocess.run(argv(job.task, out), cwd=ROOT, check=False).returncode
        made = "written" if job.out.exists() else "no result"
        return f"status {code}, {made}, {time.perf_counter() - before:.0f} s"
    request = job.out.with_suffix(".cell")
    request.write_text(json.dumps(vars(job.task)))
    words = [sys.executable, "-m", "benchmarks.measure", shown(request), out]
    try:
        done = subprocess.run(words, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        request.unlink()
    if not job.out.exists():  # not even a report of failure: the process was killed, or crashed
        write(job.out, {
            "cell": vars(job.task), "config": job.task.config.to_json(),
            **provenance.about(job.device), **died(done.returncode, done.stderr),
        })  # fmt: skip
    content = json.loads(job.out.read_text())
    return f"{summary(content)}, {time.perf_counter() - before:.0f} s"


def shown(path: Path) -> str:
    """As a command in the repository's root names it: results say their commands."""
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def died(code: int, stderr: str) -> dict[str, str]:
    """Linux kills the process that takes the last memory."""
    status = "OOM" if code == -9 else "failed"
    lines = stderr.strip().splitlines()
    return {"status": status, "why": f"exit status {code}; {lines[-1] if lines else 'silent'}"}


def summary(content: dict) -> str:
    if content["status"] != "ok":
        return f"{content['status']}: {content['why']}"
    return f"{content['tokens_per_second']:,.0f} tokens/s, final loss {content['final_loss']:.4f}"


def say(line: str) -> None:
    print(line, flush=True)


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    listed = "\n".join(f"  {name:8}{make('cpu').what}" for name, make in SUITES.items())
    parser = Parser(
        prog="python -m benchmarks.run",
        description=f"Measures a suite and writes its report.\n\n{listed}",
    )
    parser.add_argument("suite", metavar="SUITE", help=", ".join(SUITES))
    parser.add_argument("--out", metavar="DIR", type=Path,
                        help="where results go (default: runs/benchmarks/SUITE)")  # fmt: skip
    parser.add_argument("--minutes", metavar="M", type=reader(float), default=float("inf"),
                        help="start no cell after so many (default: no limit)")  # fmt: skip
    parser.add_argument("--rehearse", action="store_true",
                        help="gpu: the whole suite on a CPU, with toys")  # fmt: skip
    try:
        given = parser.parse_args(argv)
        require(given.suite in SUITES, "SUITE", given.suite, f"unknown; use {', '.join(SUITES)}")
        require(given.minutes > 0, "--minutes", given.minutes, "must be above 0")
        device = "cuda" if given.suite == "gpu" and not given.rehearse else "cpu"
        out = given.out or ROOT / "runs" / "benchmarks" / given.suite
        return run(SUITES[given.suite](device), out.resolve(), given.minutes)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
