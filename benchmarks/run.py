"""`python -m benchmarks.run NAME`: runs a suite, each job in a separate process.

A row that is in the file is not measured again, so an interrupted suite resumes. At the end the
tables are in FILE/report.md, without the suffix of FILE.
"""

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Container
from pathlib import Path

from benchmarks import report
from benchmarks.jobs import Job, perform, relative_path, say
from benchmarks.measure import UNSTEADY
from benchmarks.public_ports.programs import FOLDER
from benchmarks.suites import SUITES
from lockstep import results
from lockstep.doctor import machine
from lockstep.errors import UserError, require
from lockstep.exits import DONE, FAILED, STOPPED, exit_status
from lockstep.flags import Parser, reader
from lockstep.process import ROOT
from lockstep.results import Row
from lockstep.run.directory import require_writable_file

FAILURES = ("failed", "OOM", UNSTEADY)
EVERY = (*FAILURES, "ok", "not supported")


def run(
    every: list[Job], out: Path, minutes: float = float("inf"), again: Container[str] = ()
) -> int:
    """Performs jobs, without those that have a row.

    Args:
        minutes: after which no further job starts.
        again: finished rows of these states are measured again.

    Returns:
        The exit status; 1 if a job failed for another reason than memory or support.
    """
    done = find_done(every, out)
    missing = [job for job in every if job.name not in done or state(done[job.name]) in again]
    say(f"{len(every)} jobs, {len(every) - len(missing)} done")
    status, began = DONE, time.perf_counter()
    try:
        for number, job in enumerate(missing):
            spent = time.perf_counter() - began
            if spent > 60 * minutes:
                say(f"{minutes:g} minutes are over; the same command goes on with the rest")
                break
            left = f"ETA {spent / number * (len(missing) - number) / 60:.0f} min" if number else ""
            say(f"[{number + 1}/{len(missing)}] {job.name} {left}".rstrip())
            done[job.name], seconds = perform(job, out)
            say(f"  {summarise(done[job.name])}, {seconds:.0f} s")
    except KeyboardInterrupt:
        say("stopped; the same command goes on where it stopped")
        status = STOPPED
    say(describe_outcome(every, done))
    if status == DONE and any(state(row) == "failed" for row in done.values()):
        status = FAILED
    return status


def find_done(every: list[Job], out: Path) -> dict[str, Row]:
    """The rows of the jobs that have been measured, by name."""
    rows = {device: results.read(out, device) for device in {job.device for job in every}}
    found = {job.name: rows[job.device].get(job.name) for job in every}
    return {job.name: row for job in every if (row := found[job.name]) and job.is_finished(row)}


def state(row: Row) -> str:
    return row.get("status", "ok")


def summarise(row: Row) -> str:
    if state(row) != "ok":
        return f"{row['status']}: {row['why']}"
    if "tokens_per_second" not in row:
        return row.get("verdict", "ok")
    return f"{row['tokens_per_second']:,.0f} tokens/s, final loss {row['final_loss']:.4f}"


def describe_outcome(every: list[Job], done: dict[str, Row]) -> str:
    """How many jobs ended how; and of each that has no result the reason."""
    counts = Counter(state(done[job.name]) if job.name in done else "not run" for job in every)
    lines = [", ".join(f"{n} {what}" for what, n in counts.items())]
    lines += [f"  {name}: {summarise(row)}" for name, row in done.items() if state(row) != "ok"]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    listed = [f"  {name:16}{suite.what}" for name, suite in SUITES.items()]
    parser = Parser(
        prog="python -m benchmarks.run", description=__doc__, epilog="\n".join(["names:", *listed])
    )
    parser.add_argument("name", metavar="NAME", help="what to measure: see below")
    parser.add_argument("--out", metavar="FILE", type=Path,
                        help="where rows go (default: runs/benchmarks/NAME.jsonl)")  # fmt: skip
    parser.add_argument("--only", metavar="TEXT", default="",
                        help="only jobs with TEXT in their names")  # fmt: skip
    parser.add_argument("--again", action="store_true", help="measure finished rows again")
    parser.add_argument("--failed", action="store_true",
                        help="measure again what failed, or was disturbed")  # fmt: skip
    parser.add_argument("--minutes", metavar="M", type=reader(float), default=float("inf"),
                        help="no job starts later (default: no limit)")  # fmt: skip
    parser.add_argument("--device", metavar="cpu|cuda",
                        help="where it runs (default: cpu; of gpu cuda)")  # fmt: skip
    parser.add_argument(
        "--root",
        metavar="DIR",
        type=Path,
        help="public-ports: the folder of checkouts, OWNER+NAME each",
    )
    given = parser.parse_args(argv)
    require(given.name in SUITES, "NAME", given.name, f"unknown; use {', '.join(SUITES)}")
    device = given.device or ("cuda" if given.name == "gpu" else "cpu")
    require(device in ("cpu", "cuda"), "--device", device, "unknown; use cpu or cuda")
    require(given.minutes > 0, "--minutes", given.minutes, "must be above 0")
    if given.root:
        require(given.root.is_dir(), "--root", given.root, "no folder; name one with checkouts")
        os.environ[FOLDER] = str(given.root.resolve())  # for the jobs' processes, too
    suite = SUITES[given.name]
    every = [job for job in suite.jobs(device) if given.only in job.name]
    require(bool(every), "--only", given.only, "no job has that in its name")
    out = (given.out or ROOT / "runs" / "benchmarks" / f"{given.name}.jsonl").resolve()
    if not given.out:
        out.parent.mkdir(parents=True, exist_ok=True)
    require_writable_file(out)
    if device == "cuda":
        require_gpu()
    for number in (signal.SIGTERM, signal.SIGHUP):  # a lost connection leaves no process behind
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
    say(f"{given.name}, {suite.what}")
    status = run(every, out, given.minutes, EVERY if given.again else FAILURES * given.failed)
    try:
        say(f"report: {relative_path(report.write(out))}")
    except OSError as error:
        say(f"no report: {error}")
    return status


def require_gpu() -> None:
    """Raises UserError if NVIDIA's driver sees none; that a framework sees none is a result."""
    driver, gpus, error = machine.nvidia()
    if not (driver or gpus):
        why = error or "no NVIDIA driver answers"
        raise UserError(f"--device cuda: no CUDA GPU here ({why}); use --device cpu")


if __name__ == "__main__":
    sys.exit(exit_status(main, interruptible=True))
