"""Traces of references that were recorded before, in the user's cache."""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

from lockstep.check.sides import trace
from lockstep.check.sides.program import PACKAGE
from lockstep.errors import UserError
from lockstep.files import durable
from lockstep.files.cache import cache_folder
from lockstep.files.untrusted import Refused, read_json
from lockstep.process import ROOT, environment
from lockstep_recorder import watch

LIMIT = 2**30  # bytes of all traces; what was not used for longest goes first
FACTS, FACTS_LIMIT = "facts.json", 10_000_000
# Variables that say how a shell is used, and nothing of a program.
SHELL = {"_", "COLUMNS", "LINES", "LOCKSTEP_CACHE", "OLDPWD", "PWD", "SHLVL", "TERM", "WINDOWID"}


def key(program: str, python: str, flags: dict[str, Any]) -> str:
    """Returns the name of a reference's trace: a digest of what is known before it runs."""
    is_file = program.endswith(".py")
    variables = {name: x for name, x in environment({}).items() if name not in SHELL}
    recorder = {file.name: watch.digest(str(file)) for file in (ROOT / PACKAGE).glob("*.py")}
    known = [os.path.abspath(program) if is_file else program, os.getcwd(), python, flags,
             variables, recorder]  # fmt: skip
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:32]


def find(name: str) -> trace.Trace | None:
    """Reads a trace that is kept; None where there is none, a damaged one, or one of a program
    that has changed since."""
    with contextlib.suppress(OSError, Refused, UserError, LookupError, TypeError, AttributeError):
        folder = cache_folder() / "traces" / name
        facts = read_json(folder / FACTS, limit=FACTS_LIMIT)
        if facts == watch.look(facts):
            found = trace.read(folder)
            found.about["kept_since"] = str(date.fromtimestamp((folder / FACTS).stat().st_mtime))
            os.utime(folder)
            return found
    return None


def keep(name: str, recorded: Path, facts: watch.Facts) -> None:
    """Puts a trace into the cache, in place of what has its name; what cannot be kept is not."""
    with contextlib.suppress(OSError):
        traces = cache_folder() / "traces"
        traces.mkdir(parents=True, exist_ok=True)
        with durable.lock(traces):
            if _size(recorded) > LIMIT:
                return
            with tempfile.TemporaryDirectory(dir=traces, prefix="new-") as new:
                whole = Path(new) / name
                shutil.copytree(recorded, whole)
                (whole / FACTS).write_text(json.dumps(facts), encoding="utf-8")
                shutil.rmtree(traces / name, ignore_errors=True)
                whole.rename(traces / name)
            _trim(traces)


def _trim(traces: Path) -> None:
    room = LIMIT
    for folder in sorted(traces.iterdir(), key=lambda each: -each.stat().st_mtime_ns):
        room -= _size(folder)
        if room < 0:
            shutil.rmtree(folder, ignore_errors=True)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
