"""Where a figure comes from, and whether today's code would still give it.

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

from lockstep.process import RESULTS, ROOT, git, git_commit

TRAINING = (  # what decides the numbers of a run; `lockstep doctor` alone runs the probes
    "lockstep/config", "lockstep/data", "lockstep/model", "lockstep/train", "lockstep/twin.py",
    "jax_impl", "torch_ref", ":!jax_impl/inspect/probe.py", ":!torch_ref/inspect/probe.py",
)  # fmt: skip
# A twin's front hands on what the twin computes; what it keeps of freed memory decides no number.
HANDED_ON = (":!jax_impl/twin.py", ":!torch_ref/twin.py", ":!lockstep/train/memory.py")
PACKAGES = ("jax", "flax", "optax", "jmp", "torch", "numpy")
# Instruction sets by which the kernels of XLA, oneDNN and MKL differ.
FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def measured(device: str, seconds: float | None = None) -> dict[str, Any]:
    """Of this process, to stand in a row as `measured`; `seconds` is how long the row took."""
    return {
        "commit": git_commit() or None, "date": str(date.today()), "device": device, "cpu": cpu(),
        "python": platform.python_version(), "versions": versions(),
        "command": " ".join([_program(), shlex.join(sys.argv[1:])]).strip(), "seconds": seconds,
    }  # fmt: skip


def _program() -> str:
    """The command as one types it; `python -m NAME` shows itself as a file."""
    path = Path(sys.argv[0])
    ours = path.is_relative_to(ROOT) and "site-packages" not in path.parts
    if not (path.suffix == ".py" and ours):
        return path.parent.name if path.stem == "__main__" else path.name
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__main__" else parts)
    return name if name == "lockstep" else f"python -m {name}"


@cache
def cpu() -> dict[str, Any]:
    """Its model, those of `FLAGS` that it has, and how many cores; None for what is not known.

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


@cache
def changed_files(since: str | None, paths: tuple[str, ...]) -> tuple[str, ...] | None:
    """What differs from a commit under these paths; None where that commit is not known."""
    if not since or "+" in since:
        return None
    others = (f":!{folder}" for folder in RESULTS)
    names = git("diff", "--name-only", since, "--", *paths, *others)
    return None if names is None else tuple(names.splitlines())


def commits_since(commit: str | None) -> int | None:
    """None where it is not known, or no ancestor of HEAD."""
    if not commit or git("merge-base", "--is-ancestor", commit.partition("+")[0], "HEAD") is None:
        return None
    count = git("rev-list", "--count", f"{commit.partition('+')[0]}..HEAD")
    return None if count is None else int(count)


def is_current(former: dict[str, Any], paths: tuple[str, ...]) -> bool:
    """Whether these libraries, this CPU and this code gave the row; `paths` is all that counts."""
    today = measured(former["device"])
    if any(former[name] != today[name] for name in ("cpu", "python", "versions")):
        return False
    return former["commit"] == today["commit"] or changed_files(former["commit"], paths) == ()
