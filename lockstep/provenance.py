"""The origin of a figure: the release, the commit, the machine, the versions, the command.

A commit is that of the working tree; a tree with changes has "+" and a digest of them behind it.
Outside of git it is None, as in results from before commits were recorded.
"""

import os
import platform
import shlex
import sys
from datetime import date
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lockstep import __version__
from lockstep.process import ROOT, git_commit

PACKAGES = ("jax", "flax", "optax", "jmp", "torch", "numpy")
# Instruction sets by which the kernels of XLA, oneDNN and MKL differ.
FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def measured(device: str, seconds: float | None = None) -> dict[str, Any]:
    """Returns the origin of a row that this process has measured.

    Args:
        seconds: how long the row took.

    Returns:
        What stands in the row as `measured`.
    """
    return {
        "release": __version__, "commit": git_commit() or None, "date": str(date.today()),
        "device": device, "cpu": cpu(),
        "python": platform.python_version(), "versions": versions(),
        "command": " ".join([_program(), shlex.join(sys.argv[1:])]).strip(), "seconds": seconds,
    }  # fmt: skip


def _program() -> str:
    """Writes the command as one types it; `python -m NAME` shows itself as a file."""
    path = Path(sys.argv[0])
    ours = path.is_relative_to(ROOT) and "site-packages" not in path.parts
    if not (path.suffix == ".py" and ours):
        return path.parent.name if path.stem == "__main__" else path.name
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__main__" else parts)
    return name if name == "lockstep" else f"python -m {name}"


@cache
def cpu() -> dict[str, Any]:
    """Describes the CPU: its model, its `FLAGS`, the number of cores; None for unknown facts.

    Its family and number, as x86's CPUs have them: one "AMD EPYC" has an AVX-512 twice as fast as
    another's.
    """
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        info = ""
    fields = {
        name.strip(): value.strip()
        for name, _, value in (line.partition(":") for line in info.splitlines())
    }
    flags = fields["flags"].split() if "flags" in fields else None
    return {
        "model": fields.get("model name") or platform.processor() or None,
        "family": "/".join(filter(None, map(fields.get, ("cpu family", "model")))) or None,
        "flags": None if flags is None else [flag for flag in FLAGS if flag in flags],
        "cores": os.cpu_count(),
    }


@cache
def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
