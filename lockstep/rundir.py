"""A run's directory: `config.json`, `log.jsonl`, `checkpoints/`."""

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep import __version__
from lockstep.config import Config
from lockstep.errors import UserError, require

FORMAT = 1
OWNED = ("config.json", "log.jsonl", "checkpoints")
SIZE_LIMIT = 1_000_000  # bytes of a config.json; ours has some 3,000


@dataclass(frozen=True, kw_only=True)
class Record:
    """What config.json says of a run."""

    config: Config
    framework: str
    data_sha256: str
    details: dict[str, Any]  # device, versions, commit: for a reader, never read back


def fresh_name(stem: str) -> Path:
    """runs/STEM, or the first runs/STEM-2, -3 ... that is not taken."""
    names = (Path("runs") / (stem if n == 1 else f"{stem}-{n}") for n in range(1, 10_000))
    return next(name for name in names if not name.exists())


def require_free(out: Path, *, overwrite: bool) -> None:
    """Raises UserError if a run or anything else is at `out` and may not be replaced."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    require(out.is_dir(), "--out", out, "is a file; name a directory")
    is_run = (out / "config.json").exists()
    if overwrite:
        require(is_run, "--out", out, "is not a run, so --overwrite leaves it; name another")
    else:
        remedy = "use --resume, --overwrite or another name" if is_run else "name another"
        require(False, "--out", out, f"exists already; {remedy}")


def create(out: Path) -> None:
    """Makes the directory, emptied of an earlier run's files (and of nothing else)."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in OWNED:
            path = out / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        require(os.access(out, os.W_OK), "--out", out, "cannot be written; name another")
    except OSError as error:
        raise UserError(
            f"--out {out}: cannot be written ({error.strerror}); name another"
        ) from None


def write_record(out: Path, record: Record) -> None:
    """Writes config.json, whole or not at all."""
    content = {
        "format": FORMAT,
        "lockstep": __version__,
        "framework": record.framework,
        "data_sha256": record.data_sha256,
        "config": record.config.to_json(),
        **record.details,
        "git_commit": git_commit(),
    }
    temporary = out / "config.json.tmp"
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(temporary, out / "config.json")


def read_record(out: Path) -> Record:
    """Reads config.json.

    Raises:
        UserError: there is no run at `out`, or its config.json is not ours.
    """
    path = out / "config.json"
    try:
        require(path.stat().st_size <= SIZE_LIMIT, str(path), "too large", "not a Lockstep run")
        content = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{out}: not a run, it has no config.json; name a run") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({error}); name another run") from None
    require(
        isinstance(content, dict) and content.get("format") == FORMAT,
        str(path),
        "format",
        f"not a Lockstep run of format {FORMAT}; name another run",
    )
    texts = (content.get("framework"), content.get("data_sha256"))
    require(
        all(isinstance(text, str) for text in texts),
        str(path),
        "fields",
        "framework or data_sha256 is missing; name another run",
    )
    return Record(
        config=Config.from_json(content.get("config")),
        framework=content["framework"],
        data_sha256=content["data_sha256"],
        details={},
    )


def git_commit() -> str | None:
    """The commit of the code that runs; None outside a repository."""
    here = Path(__file__).parent
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
