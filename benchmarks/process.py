"""What the drivers share that start a process for each measurement."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from lockstep import results
from lockstep.errors import UserError
from lockstep.files.untrusted import Refused, parse_json
from lockstep.flags import Parser
from lockstep.process import NO_CHANGE, ROOT, last_line
from lockstep.results import Row

LIMIT = 4 * 3600.0  # seconds of a process that nothing else limits
KEPT = 4_000  # bytes, the last that a failed process has printed
Made = TypeVar("Made")


def words(argv: list[str] | None, module: str, *names: str, about: str | None = None) -> list[str]:
    """Of a command without flags: so many words and nothing else."""
    parser = Parser(prog=f"python -m {module}", description=about)
    for name in names:
        parser.add_argument(name, metavar=name)
    return list(vars(parser.parse_args(argv)).values())


def parse_word(text: str) -> Any:
    """A word of the command line that is JSON.

    Raises:
        UserError: it is none.
    """
    try:
        return parse_json(text.encode())
    except Refused as why:
        raise UserError(f"{text[:40]!r}: {why}; give JSON") from None


def build(kind: Callable[..., Made], fields: Any) -> Made:
    """Raises UserError if these are not its fields."""
    try:
        return kind(**fields)
    except TypeError as error:
        raise UserError(f"{str(fields)[:40]}: {error}; give its fields as JSON") from None


def relative_path(path: Path) -> str:
    """As a command in the repository's root names it: results say their commands."""
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


class End(NamedTuple):
    """How a process ended; `code` is None if it did not by itself, or could not be started."""

    code: int | None
    printed: str = ""  # the last of it
    error: str = ""  # why it has no code

    @property
    def failure(self) -> Row:
        """Of a row: its status, the reason, and what was printed last."""
        return {"status": "failed", "why": self._why(), "printed": self.printed}

    def _why(self) -> str:
        if self.code is None:
            return self.error
        if self.code < 0:
            memory = ", as Linux does where no memory is left" * (self.code == -signal.SIGKILL)
            return f"killed by signal {-self.code} ({signal.strsignal(-self.code)}){memory}"
        return f"exit status {self.code}; {last_line(self.printed)[:300] or 'silent'}"


def run_apart(
    words: list[str], limit: float = LIMIT, changes: Mapping[str, str] = NO_CHANGE
) -> End:
    """Runs a command in the repository's root to its end, with all that it starts.

    Args:
        limit: seconds, after which all of it is killed.
        changes: to the environment.
    """
    try:
        # No pipe: what outlives its parent would hold it open.
        with tempfile.TemporaryFile() as printed:
            options: dict[str, Any] = {"stdout": printed, "stderr": subprocess.STDOUT}
            process = subprocess.Popen(
                words, cwd=ROOT, env={**os.environ, **changes}, stdin=subprocess.DEVNULL,
                start_new_session=True, **options,
            )  # fmt: skip
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


def measure_apart(module: str, content: Row, name: str, device: str, out: Path,
                  limit: float = LIMIT, changes: Mapping[str, str] = NO_CHANGE,
                  ) -> tuple[Row, float]:  # fmt: skip
    """The row that `python -m MODULE CONTENT NAME FILE` puts, or one that says why there is none;
    and how many seconds that took.

    Args:
        content: what it is asked; in the row, too, if it dies before it has put one.
    """
    began, former = time.perf_counter(), results.read(out, device).get(name)
    words = [sys.executable, "-m", module, json.dumps(content), name, relative_path(out)]
    end = run_apart(words, limit, changes)
    row, seconds = results.read(out, device).get(name), time.perf_counter() - began
    if row is None or row == former:  # no report of a failure: the process was killed, or crashed
        row = results.row(name, device, seconds, **content, **end.failure)
        put(out, row)
    return row, seconds


def put(out: Path, row: Row) -> None:
    """A row, or what cannot be written of it: a full disk ends no suite."""
    try:
        results.put(out, [row])
    except UserError as error:
        say(f"not written, {error}: {json.dumps(row)}")


def say(line: str) -> None:
    print(line, flush=True)
