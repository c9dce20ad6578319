"""The Python processes that Lockstep starts, and the commit of the code that they run."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# A model of the matrix is too small to share: with more threads two processes fight for the cores.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "NPROC": "1"}
RESULTS = ("benchmarks/results", "docs/results")  # what a measurement writes changes no program,
DOCUMENTS = ("docs", "README.md")  # and neither do the tables that are made of it
NO_CHANGE: Mapping[str, str] = {}
# How often a waiting thread of libgomp looks before it sleeps; its own default is 300,000. Where
# another process has a core, threads that look all the time take it from those that compute.
SPINS = {"GOMP_SPINCOUNT": "50000"}
WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # either says how threads wait


def wait_briefly() -> None:
    """Bounds how long PyTorch's threads wait awake, unless the user has set it. Call it before
    PyTorch is loaded."""
    if not any(name in os.environ for name in WAITING):
        os.environ.update(SPINS)


def start_module(
    module: str, *words: str, changes: Mapping[str, str] = NO_CHANGE, **options: Any
) -> subprocess.Popen[Any]:
    """Starts `python -m MODULE WORDS` with `changes` to the environment; does not wait for it."""
    return subprocess.Popen(module_command(module, *words), env=environment(changes), **options)


def module_command(module: str, *words: str, python: str = sys.executable) -> list[str]:
    return [python, "-m", module, *words]


def last_line(printed: str) -> str:
    """Finds the line in which a failed process says why; "" if it was silent."""
    return next((line.strip() for line in reversed(printed.splitlines()) if line.strip()), "")


def environment(changes: Mapping[str, str]) -> dict[str, str]:
    """Copies this process's environment with `changes`; our packages are found from any folder."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, **changes}


@cache
def git_commit() -> str:
    """Returns this process's commit, with "+" and a digest if files changed; "" if unknown."""
    head = git("rev-parse", "--short", "HEAD")
    if head is None:
        return ""
    written = (f":!{path}" for path in (*RESULTS, *DOCUMENTS))
    changes = git("diff", "HEAD", "--", ".", *written)
    return head + ("+" + hashlib.sha256(changes.encode()).hexdigest()[:8] if changes else "")


def git(*words: str) -> str | None:
    """Runs git; returns its output, or None if it fails or this tree is no checkout."""
    if not (ROOT / ".git").exists():
        return None
    # A diff has the bytes of its files, which need not be UTF-8.
    options: dict[str, Any] = {"cwd": ROOT, "capture_output": True, "timeout": 20,
                               "encoding": "utf-8", "errors": "replace"}  # fmt: skip
    try:
        return subprocess.run(["git", *words], check=True, **options).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
