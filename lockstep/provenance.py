"""Where a committed figure comes from: device, versions, commit, date, command."""

import os
import platform
import shlex
import sys
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

from lockstep.errors import UserError, require
from lockstep.files.untrusted import Refused, read_json
from lockstep.process import ROOT, git_commit

LARGEST = 10_000_000  # bytes of a result; ours have up to 30,000
PACKAGES = ("jax", "flax", "optax", "jmp", "torch", "numpy")


def about(device: str) -> dict[str, Any]:
    """Of this process, to be put at the head of a result's JSON."""
    return {
        "device": device, "cores": os.cpu_count(), "date": str(date.today()),
        "commit": git_commit(),
        "command": " ".join([_program(), shlex.join(sys.argv[1:])]).strip(),
        "python": platform.python_version(), "versions": versions(),
    }  # fmt: skip


def _program() -> str:
    """The command as one types it; `python -m NAME` shows itself as a file."""
    path = Path(sys.argv[0])
    if path.stem == "__main__":
        return path.parent.name
    if path.suffix == ".py" and path.is_relative_to(ROOT):
        return "python -m " + ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return path.name


def former(out: Path | None, name: str) -> dict[str, Any]:
    """What a result that is there already says under a name; of a file that is not there, nothing.

    Raises:
        UserError: it is no such result, so it is not to be written over.
    """
    if out is None or not os.path.lexists(out):
        return {}
    try:
        found = read_json(out, limit=LARGEST, links=True).get(name)
    except (OSError, Refused) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"--out {out}: cannot be added to ({why}); name another file") from None
    require(type(found) is dict, "--out", out, f"a result without {name!r}; name another file")
    return cast(dict[str, Any], found)


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
