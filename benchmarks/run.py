"""`python -m benchmarks.run NAME`: a suite, every cell in a fresh process, then the report; or one
of the experiments.

Rows that are there are not measured again, so that an interrupted suite goes on where it stopped.
"""

import signal
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Container
from pathlib import Path
from typing import NamedTuple

from benchmarks import report
from benchmarks.cells import Cell
from benchmarks.experiments import run as experiments
from benchmarks.measure import about
from benchmarks.process import ROOT, measure_apart, put, relative_path, run_apart, say
from benchmarks.suites import SUITES, Suite, Task, argv
from lockstep import results
from lockstep.doctor import machine
from lockstep.errors import UserError, require
from lockstep.exits import DONE, STOPPED, exit_status
from lockstep.flags import Parser, reader
from lockstep.results import Row
from lockstep.run.directory import require_writable_file

FAILURES = ("failed", "OOM")


class Job(NamedTuple):
    """A task, and the name of the row that says that it is done."""

    task: Task
    name: str


def jobs(suite: Suite) -> list[Job]:
    """Round after round, so that A is measured before and after B; a command only once."""
    listed = []
    for number in range(1, suite.rounds + 1):
        for task in suite.tasks:
            if isinstance(task, Cell):
                listed.append(Job(task, f"{task.name}.{number}"))
            elif number == 1:
                listed.append(Job(task, f"command {task.name}"))
    return listed


def is_finished(row: Row | None, job: Job) -> bool:
    """Whether this very job has been measured."""
    cell = about(job.task).items() if isinstance(job.task, Cell) else ()
    return row is not None and all(row.get(name) == value for name, value in cell)


def run(suite: Suite, out: Path, minutes: float, again: Container[str] = ()) -> int:
    """Returns the exit status; 1 if a job failed for another reason than memory or support.

    Args:
        again: finished rows of these states are measured again.
    """
    every, rows = jobs(suite), results.read(out, suite.device)
    done = {job.name: rows[job.name] for job in every if is_finished(rows.get(job.name), job)}
    missing = [job for job in every if job.name not in done or state(done[job.name]) in again]
    say(f"{suite.what}: {len(every)} jobs on {suite.device}, {len(every) - len(missing)} done")
    status, began = DONE, time.perf_counter()
    try:
        for number, job in enumerate(missing):
            spent = time.perf_counter() - began
            if spent > 60 * minutes:
                say(f"{minutes:g} minutes are over; the same command goes on with the rest")
                break
            left = f"ETA {spent / number * (len(missing) - number) / 60:.0f} min" if number else ""
            say(f"[{number + 1}/{len(missing)}] {job.name} {left}".rstrip())
            done[job.name], seconds = perform(job, suite, out)
            say(f"    {summary(done[job.name])}, {seconds:.0f} s")
    except KeyboardInterrupt:
        say("stopped; the same command goes on where it stopped")
        status = STOPPED
    say(f"\n{outcome(every, done)}")
    status = status or int(any(state(row) == "failed" for row in done.values()))
    try:
        say(f"report: {report.write(out)}")
    except OSError as error:
        say(f"no report: {error}")
    return status


def perform(job: Job, suite: Suite, out: Path) -> tuple[Row, float]:
    """Runs one job to its end, which puts its rows; its own row, and its seconds."""
    if isinstance(job.task, Cell):
        content = about(job.task)
        measure = "benchmarks.measure"
        return measure_apart(measure, content, job.name, suite.device, out, suite.limit)
    began = time.perf_counter()
    end = run_apart([sys.executable, "-m", *argv(job.task, relative_path(out))], job.task.limit)
    seconds = time.perf_counter() - began
    how = {"status": "ok"} if end.code == 0 else end.failure
    row = results.row(job.name, suite.device, seconds, **how, exit_status=end.code)
    put(out, row)
    return row, seconds


def state(row: Row) -> str:
    return row.get("status", "ok")


def summary(row: Row) -> str:
    if state(row) != "ok":
        return f"{row['status']}: {row['why']}"
    if "cell" not in row:
        return "ok"
    return f"{row['tokens_per_second']:,.0f} tokens/s, final loss {row['final_loss']:.4f}"


def outcome(every: list[Job], done: dict[str, Row]) -> str:
    """How many jobs ended how; and of each that has no result the reason."""
    counts = Counter(state(done[job.name]) if job.name in done else "not run" for job in every)
    lines = [", ".join(f"{n} {what}" for what, n in counts.items())]
    lines += [f"  {name}: {summary(row)}" for name, row in done.items() if state(row) != "ok"]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    suites = [f"  {name:14}{make('cpu').what}" for name, make in SUITES.items()]
    tried = [f"  {name:14}{each.WHAT}" for name, each in experiments.EXPERIMENTS.items()]
    parser = Parser(
        prog="python -m benchmarks.run",
        description="\n".join([
            "Measures a suite and writes its report:", "", *suites, "",
            "or makes an experiment and prints its figures:", "", *tried,
        ]),
    )  # fmt: skip
    parser.add_argument("name", metavar="NAME", help="a suite or an experiment")
    parser.add_argument("--out", metavar="FILE", type=Path,
                        help="where the rows go; report and pictures go into the folder FILE "
                        "without its suffix (default: runs/benchmarks/NAME.jsonl)")  # fmt: skip
    parser.add_argument("--again", action="store_true",
                        help="measure finished rows again (default: off)")  # fmt: skip
    parser.add_argument("--failed", action="store_true",
                        help="a suite: measure again what failed (default: off)")  # fmt: skip
    parser.add_argument("--minutes", metavar="M", type=reader(float),
                        help="a suite: no cell starts later (default: no limit)")  # fmt: skip
    parser.add_argument("--rehearse", action="store_true",
                        help="gpu: the whole suite on a CPU, with toys")  # fmt: skip
    parser.add_argument("--scale", metavar="smoke|full",
                        help="an experiment: minutes with a toy, or the real model "
                        "(default: smoke on a CPU, else full)")  # fmt: skip
    parser.add_argument("--device", metavar="cpu|cuda",
                        help="an experiment: where it runs (default: cpu)")  # fmt: skip
    given = parser.parse_args(argv)
    known = [*SUITES, *experiments.EXPERIMENTS]
    require(given.name in known, "NAME", given.name, f"unknown; use {', '.join(known)}")
    out = (given.out or ROOT / "runs" / "benchmarks" / f"{given.name}.jsonl").resolve()
    if not given.out:
        out.parent.mkdir(parents=True, exist_ok=True)
    require_writable_file(out)
    return _suite(given, out) if given.name in SUITES else _experiment(given, out)


def _suite(given: Namespace, out: Path) -> int:
    for flag in ("scale", "device"):
        value = getattr(given, flag)
        require(value is None, f"--{flag}", value, f"{given.name} is a suite, which has none")
    minutes = float("inf") if given.minutes is None else given.minutes
    require(minutes > 0, "--minutes", minutes, "must be above 0")
    device = "cuda" if given.name == "gpu" and not given.rehearse else "cpu"
    if device == "cuda":
        require_gpu()
    for number in (signal.SIGTERM, signal.SIGHUP):  # a lost connection leaves no process behind
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
    again = (*FAILURES, "ok", "not supported") if given.again else FAILURES * given.failed
    return run(SUITES[given.name](device), out, minutes, again)


def require_gpu() -> None:
    """Raises UserError if NVIDIA's driver sees none; that a framework sees none is a result."""
    driver, gpus, error = machine.nvidia()
    if not (driver or gpus):
        why = error or "no NVIDIA driver answers"
        raise UserError(f"gpu: no CUDA GPU here ({why}); --rehearse runs the suite on a CPU")


def _experiment(given: Namespace, out: Path) -> int:
    remedy = f"{given.name} is an experiment, which has none; drop it"
    require(not given.failed, "--failed", True, remedy)
    require(given.minutes is None, "--minutes", given.minutes, remedy)
    require(not given.rehearse, "--rehearse", True, remedy)
    device = given.device or "cpu"
    require(device in ("cpu", "cuda"), "--device", device, "unknown; use cpu or cuda")
    scale = given.scale or ("smoke" if device == "cpu" else "full")
    scales = experiments.SCALES
    require(scale in scales, "--scale", scale, f"unknown; use {' or '.join(scales)}")
    return experiments.run(given.name, scale, device, out, given.again)


if __name__ == "__main__":
    sys.exit(exit_status(main, interruptible=True))
