"""What the drivers share that start a process for each measurement."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from lockstep import provenance, results
from lockstep.errors import UserError
from lockstep.files.untrusted import Refused, parse_json
from lockstep.flags import Parser
from lockstep.process import ROOT
from lockstep.results import Row

# What the figures of a benchmark depend on.
CODE = (*provenance.TRAINING, "lockstep/parity/pair.py", "benchmarks")
Made = TypeVar("Made")


def words(argv: list[str] | None, module: str, *names: str) -> list[str]:
    """Of a command without flags: so many words and nothing else."""
    parser = Parser(prog=f"python -m {module}")
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


def describe_exit(code: int, stderr: str) -> dict[str, str]:
    """Linux kills the process that takes the last memory."""
    status = "OOM" if code == -9 else "failed"
    lines = stderr.strip().splitlines()
    return {"status": status, "why": f"exit status {code}; {lines[-1] if lines else 'silent'}"}


def measure_apart(module: str, content: Row, name: str, device: str, out: Path,
                  **variables: str) -> tuple[Row, float]:  # fmt: skip
    """The row that `python -m MODULE CONTENT NAME FILE` puts, and how many seconds that took.

    Args:
        content: what it is asked; in the row, too, if it dies before it has put one.
        variables: of its environment, beside ours.
    """
    began, former = time.perf_counter(), results.read(out, device).get(name)
    words = [sys.executable, "-m", module, json.dumps(content), name, relative_path(out)]
    done = subprocess.run(
        words, cwd=ROOT, env=os.environ | variables, stderr=subprocess.PIPE, text=True
    )
    row, seconds = results.read(out, device).get(name), time.perf_counter() - began
    if row is None or row == former:  # no report of a failure: the process was killed, or crashed
        row = results.row(
            name, device, seconds, **content, **describe_exit(done.returncode, done.stderr)
        )
        results.put(out, [row])
    return row, seconds


def say(line: str) -> None:
    print(line, flush=True)
