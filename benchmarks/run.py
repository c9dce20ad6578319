"""`python -m benchmarks.run NAME`: a suite, every cell in a fresh process, then the report; or one
of the experiments.

What is there already is not measured again, so an interrupted suite goes on where it stopped.
"""

import json
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import NamedTuple

from benchmarks import report
from benchmarks.cells import Cell
from benchmarks.experiments import run as experiments
from benchmarks.measure import write
from benchmarks.process import ROOT, died, say, shown
from benchmarks.suites import SUITES, Command, Suite, Task, argv
from lockstep import provenance
from lockstep.cli.flags import Parser, reader
from lockstep.errors import UserError, require
from lockstep.exits import STOPPED
from lockstep.process import run_module
from lockstep.run.directory import require_writable


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
        status = STOPPED
    say(f"report: {report.write(out)}")
    return status


def perform(job: Job) -> str:
    """Runs one job to its end; what came of it, in a line."""
    before, out = time.perf_counter(), shown(job.out)
    if isinstance(job.task, Command):
        code = run_module(*argv(job.task, out), cwd=ROOT).returncode
        made = "written" if job.out.exists() else "no result"
        return f"status {code}, {made}, {time.perf_counter() - before:.0f} s"
    request = job.out.with_suffix(".cell")
    request.write_text(json.dumps(vars(job.task)))
    try:
        done = run_module("benchmarks.measure", shown(request), out, cwd=ROOT,
                          stderr=subprocess.PIPE, text=True)  # fmt: skip
    finally:
        request.unlink()
    if not job.out.exists():  # not even a report of failure: the process was killed, or crashed
        write(job.out, {
            "cell": vars(job.task), "config": job.task.config.to_json(),
            **provenance.about(job.device), **died(done.returncode, done.stderr),
        })  # fmt: skip
    content = json.loads(job.out.read_text())
    return f"{summary(content)}, {time.perf_counter() - before:.0f} s"


def summary(content: dict) -> str:
    if content["status"] != "ok":
        return f"{content['status']}: {content['why']}"
    return f"{content['tokens_per_second']:,.0f} tokens/s, final loss {content['final_loss']:.4f}"


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    suites = [f"  {name:14}{make('cpu').what}" for name, make in SUITES.items()]
    tried = [f"  {name:14}{each.WHAT}" for name, each in experiments.EXPERIMENTS.items()]
    parser = Parser(
        prog="python -m benchmarks.run",
        description="\n".join([
            "Measures a suite and writes its report:", "", *suites, "",
            "or makes an experiment and says what came of it:", "", *tried,
        ]),
    )  # fmt: skip
    parser.add_argument("name", metavar="NAME", help="a suite or an experiment")
    parser.add_argument("--out", metavar="DIR", type=Path,
                        help="where results go (default: runs/benchmarks/NAME)")  # fmt: skip
    parser.add_argument("--minutes", metavar="M", type=reader(float),
                        help="a suite: no cell starts later (default: no limit)")  # fmt: skip
    parser.add_argument("--rehearse", action="store_true",
                        help="gpu: the whole suite on a CPU, with toys")  # fmt: skip
    parser.add_argument("--scale", metavar="smoke|full",
                        help="an experiment: minutes with a toy, or the real model "
                        "(default: smoke on a CPU, else full)")  # fmt: skip
    parser.add_argument("--device", metavar="cpu|cuda",
                        help="an experiment: where it runs (default: cpu)")  # fmt: skip
    try:
        given = parser.parse_args(argv)
        known = [*SUITES, *experiments.EXPERIMENTS]
        require(given.name in known, "NAME", given.name, f"unknown; use {', '.join(known)}")
        out = (given.out or ROOT / "runs" / "benchmarks" / given.name).resolve()
        require_writable(out)
        return _suite(given, out) if given.name in SUITES else _experiment(given, out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _suite(given: Namespace, out: Path) -> int:
    for flag in ("scale", "device"):
        value = getattr(given, flag)
        require(value is None, f"--{flag}", value, f"{given.name} is a suite, which has none")
    minutes = float("inf") if given.minutes is None else given.minutes
    require(minutes > 0, "--minutes", minutes, "must be above 0")
    device = "cuda" if given.name == "gpu" and not given.rehearse else "cpu"
    return run(SUITES[given.name](device), out, minutes)


def _experiment(given: Namespace, out: Path) -> int:
    remedy = f"{given.name} is an experiment, which has none; drop it"
    require(given.minutes is None, "--minutes", given.minutes, remedy)
    require(not given.rehearse, "--rehearse", True, remedy)
    device = given.device or "cpu"
    require(device in ("cpu", "cuda"), "--device", device, "unknown; use cpu or cuda")
    scale = given.scale or ("smoke" if device == "cpu" else "full")
    scales = experiments.SCALES
    require(scale in scales, "--scale", scale, f"unknown; use {' or '.join(scales)}")
    return experiments.run(given.name, scale, device, out)


if __name__ == "__main__":
    sys.exit(main())
