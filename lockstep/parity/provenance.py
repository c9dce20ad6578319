"""Where a committed figure comes from: device, versions, commit, date, command."""

import os
import platform
import shlex
import subprocess
import sys
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("jax", "flax", "optax", "jmp", "torch", "numpy")


def about(device: str) -> dict[str, Any]:
    """Of this process, to be put at the head of a result's JSON."""
    return {
        "device": device, "cores": os.cpu_count(), "date": str(date.today()), "commit": commit(),
        "command": shlex.join([_program(), *sys.argv[1:]]),
        "python": platform.python_version(), "versions": versions(),
    }  # fmt: skip


def _program() -> str:
    """The command as one types it; `python -m pytest` shows itself as a file of its package."""
    path = Path(sys.argv[0])
    return path.parent.name if path.stem == "__main__" else path.name


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Of the working tree this runs from, "+" where it has changes; "" outside of git."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=Path(__file__).parent, text=True,
                              capture_output=True)  # fmt: skip
        return done.stdout.strip()

    dirty = git("status", "--porcelain", "--untracked-files=no")
    return git("rev-parse", "--short", "HEAD") + ("+" if dirty else "")
