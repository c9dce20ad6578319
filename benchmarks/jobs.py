"""A job: one measurement, in a process of its own that ends with all that it has started.

The process is `python -m benchmarks.jobs WORK GIVEN NAME DEVICE FILE`, and puts the job's row.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lockstep import results
from lockstep.errors import UserError, is_out_of_memory
from lockstep.exits import DONE, exit_status
from lockstep.process import ROOT, last_line
from lockstep.results import Row

LIMIT = 4 * 3600.0  # seconds of a job that nothing else limits
KEPT = 4_000  # bytes, the last that a failed process has printed


@dataclass(frozen=True, kw_only=True)
class Job:
    """A measurement, and how it is run.

    `work` names a function, "module:function", which is called with `given`. What was given and
    what it returns is the row.
    """

    name: str  # of its row
    work: str
    given: Mapping[str, Any]  # as JSON
    device: str = "cpu"
    limit: float = LIMIT  # seconds

    def is_finished(self, row: Row | None) -> bool:
        """Says if a row is of this very measurement."""
        given = json.loads(json.dumps(dict(self.given))).items()
        return row is not None and all(row.get(name) == value for name, value in given)


class End(NamedTuple):
    """How a process ended; `code` is None if it did not by itself, or could not be started."""

    code: int | None
    printed: str = ""  # the last of it
    error: str = ""  # why it has no code

    @property
    def failure(self) -> Row:
        """The part of a row that says why there is no result."""
        return {"status": "failed", "why": self._why(), "printed": self.printed}

    def _why(self) -> str:
        if self.code is None:
            return self.error
        if self.code < 0:
            memory = ", as Linux does where no memory is left" * (self.code == -signal.SIGKILL)
            return f"killed by signal {-self.code} ({signal.strsignal(-self.code)}){memory}"
        return f"exit status {self.code}; {last_line(self.printed)[:300] or 'silent'}"


def run_apart(words: list[str], limit: float = LIMIT) -> End:
    """Runs a command in the repository's root to its end, with all that it starts.

    Args:
        limit: seconds, after which all of it is killed.
    """
    try:
        # No pipe: what outlives its parent would hold it open.
        with tempfile.TemporaryFile() as printed:
            options: dict[str, Any] = {"stdout": printed, "stderr": subprocess.STDOUT}
            process = subprocess.Popen(
                words, cwd=ROOT, stdin=subprocess.DEVNULL, start_new_session=True, **options
            )
            try:
                code = process.wait(limit)
                error = ""
            except subprocess.TimeoutExpired:
                code, error = None, f"not ended after {limit:g} s, and killed"
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            printed.seek(max(0, printed.seek(0, os.SEEK_END) - KEPT))
            return End(code, printed.read().decode(errors="replace"), error)
    except OSError as cause:
        return End(None, error=f"not started: {cause.strerror}")


def perform(job: Job, out: Path) -> tuple[Row, float]:
    """Runs one job to its end.

    Returns:
        Its row, which says why there is no result if there is none; and the seconds it took.
    """
    began, former = time.perf_counter(), results.read(out, job.device).get(job.name)
    given = [job.work, json.dumps(dict(job.given)), job.name, job.device, relative_path(out)]
    end = run_apart([sys.executable, "-m", "benchmarks.jobs", *given], job.limit)
    row = results.read(out, job.device).get(job.name)
    seconds = time.perf_counter() - began
    if row is None or row == former:  # the process was killed, or crashed
        row = results.row(job.name, job.device, seconds, **job.given, **end.failure)
        try:
            results.put(out, [row])
        except UserError as error:  # a full disk ends no suite
            say(f"not written, {error}: {json.dumps(row)}")
    return row, seconds


def guard(work: Callable[[], Row]) -> Row:
    """The result of some work, or why there is none, which is a result too."""
    try:
        return {"status": "ok", **work()}
    except UserError as error:
        return {"status": "not supported", "why": str(error)}
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        status = "OOM" if is_out_of_memory(error) else "failed"
        printed = traceback.format_exc()[-KEPT:]
        return {"status": status, "why": text.splitlines()[0][:300], "printed": printed}


def relative_path(path: Path) -> str:
    """A path as a command in the repository's root names it."""
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def say(line: str) -> None:
    print(line, flush=True)


def main(argv: list[str]) -> int:
    """The job's process."""
    work, text, name, device, file = argv
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    given, began = json.loads(text), time.perf_counter()
    module, _, function = work.partition(":")
    content = {
        **given,
        **guard(lambda: getattr(importlib.import_module(module), function)(**given)),
    }
    seconds = time.perf_counter() - began
    results.put(Path(file), [results.row(name, device, seconds, **content)])
    return DONE


if __name__ == "__main__":
    sys.exit(exit_status(lambda: main(sys.argv[1:])))
