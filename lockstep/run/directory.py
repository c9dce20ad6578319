"""A run's directory: `config.json`, `log.jsonl`, `checkpoints/`."""

import contextlib
import itertools
import json
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep import __version__
from lockstep.config import Config
from lockstep.errors import UserError, require
from lockstep.files import durable
from lockstep.files.untrusted import Refused, read_json
from lockstep.process import git_commit
from lockstep.run import lock

FORMAT = 1
# In the order they are deleted: a folder whose config.json is still there is still a run.
SAMPLE = "sample.txt"
OWNED = ("checkpoints", "log.jsonl", SAMPLE, "tensorboard", "init", "config.json")
BEGUN = (lock.NAME, "config.json.tmp")  # all that a trainer leaves if killed before it is a run
RUNS = Path("runs")
SIZE_LIMIT = 1_000_000  # bytes of a config.json; ours has some 2,000


@dataclass(frozen=True, kw_only=True)
class Record:
    """The content of config.json."""

    config: Config
    framework: str
    data_tokens: tuple[int, int] | None  # of training and held out; None: written by release 0.2.0
    details: dict[str, Any]  # device, versions, commit: for a reader, never read back


def require_free(out: Path, *, overwrite: bool) -> None:
    """Raises UserError if a run or anything else is at `out` and may not be replaced."""
    with _writing(out):
        if out.is_dir() and any(out.iterdir()):
            begun = all(path.name in BEGUN for path in out.iterdir()) and lock.is_ours(out)
            if not is_run(out) and not begun:
                remedy = "so --overwrite leaves it" if overwrite else "but not empty"
                raise UserError(f"--out {out}: is not a run, {remedy}; name another directory")
            remedy = "is a run; use --resume, --overwrite or another name"
            require(overwrite or begun, "--out", out, remedy)
            lock.require_free(out)
        require_writable(out)


def require_writable(out: Path, field: str = "--out") -> None:
    """Raises UserError unless `out` is a directory to write in, or can be made one."""
    with _writing(out, field):
        there = next(path for path in (out, *out.parents) if path.exists())
    require(there.is_dir(), field, out, f"{there} is a file; name another directory")
    writable = os.access(there, os.W_OK | os.X_OK)
    require(writable, field, out, f"{there} cannot be written; name another directory")


def require_empty(to: Path, field: str) -> None:
    """Raises UserError unless `to` can be made, or is an empty directory.

    Not the one that the user is in: it would be replaced, and they would stay in what is gone.
    """
    require_writable(to, field)
    taken = to.exists() and any(to.iterdir())
    require(not taken, field, to, "is not empty; name another folder")
    here = to.exists() and to.samefile(".")
    require(not here, field, to, "is the folder that you are in; name another folder")


@contextlib.contextmanager
def new_folder(to: Path, field: str) -> Iterator[Path]:
    """Yields a folder to write in; it becomes `to` on success and is deleted otherwise.

    Raises:
        UserError: it cannot be written.
    """
    partial = to.with_name(f".tmp-{to.name}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with durable.writing(f"{field} {to}", "make room"):
            partial.mkdir(parents=True)
            yield partial
            os.rename(partial, to)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def require_writable_file(path: Path, field: str = "--out") -> None:
    """Raises UserError unless `path` can be written, before work is done for it."""
    folder = path.parent
    require_writable(folder, field)
    require(folder.is_dir(), field, path, f"there is no folder {folder}; make it")
    with _writing(path, field):  # a name too long
        is_folder = path.is_dir()
    require(not is_folder, field, path, "is a folder; name a file")


def make(out: Path) -> Path:
    with _writing(out):
        out.mkdir(parents=True, exist_ok=True)
    return out


def empty(out: Path) -> None:
    """Removes an earlier run's files, and nothing else."""
    with _writing(out):
        for name in OWNED:
            path = out / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def make_new(stem: str) -> Path:
    """Makes runs/STEM, or the first of runs/STEM-2, -3 ... that is not taken.

    Taken by making it: two runs that start together get a directory each.
    """
    with _writing(RUNS):
        RUNS.mkdir(exist_ok=True)
        for n in itertools.count(1):
            with contextlib.suppress(FileExistsError):
                out = RUNS / (stem if n == 1 else f"{stem}-{n}")
                out.mkdir()
                break
    return out


def write_record(out: Path, record: Record) -> None:
    """Write config.json atomically."""
    content = {
        "format": FORMAT,
        "lockstep": __version__,
        "framework": record.framework,
        "data_tokens": record.data_tokens,
        "config": record.config.to_json(),
        **record.details,
        "python": platform.python_version(),
        "git_commit": git_commit(),
    }
    with _writing(out):
        durable.replace(out / "config.json", json.dumps(content, indent=1) + "\n")


def read_record(out: Path) -> Record:
    """Read config.json.

    Raises:
        UserError: there is no run at `out`, its config.json is not ours, or it holds a symbolic
            link: an untrusted run may point at anything, and a resumed one is written to.
    """
    for owned in (out / name for name in OWNED):
        if os.path.islink(owned):
            raise UserError(f"{owned}: a symbolic link; replace it by what it points at")
    path = out / "config.json"
    content = _content(path)
    problem = f"{path}: not a Lockstep run of format {FORMAT}"
    number, framework, tokens = (content.get(n) for n in ("format", "framework", "data_tokens"))
    if not (
        (type(number), number) == (int, FORMAT)
        and isinstance(framework, str)
        and (tokens is None or _are_counts(tokens))
    ):
        raise UserError(f"{problem}; name another run")
    try:
        config = Config.from_json(content.get("config"))
    except UserError as error:
        version, commit = (str(content.get(name))[:40] for name in ("lockstep", "git_commit"))
        writer = f"lockstep {version}, commit {commit}"
        remedy = f"restore the file, or use what wrote it: {writer}"
        raise UserError(f"{problem} ({error}); {remedy}") from None
    sizes = None if tokens is None else (tokens[0], tokens[1])
    return Record(config=config, framework=framework, data_tokens=sizes, details={})


def _are_counts(tokens: Any) -> bool:
    return isinstance(tokens, list) and [type(count) for count in tokens] == [int, int]


def _content(path: Path) -> dict[str, Any]:
    try:
        if not path.is_file():
            raise UserError(f"{path.parent}: not a run, it has no config.json; name a run")
        return read_json(path, limit=SIZE_LIMIT)
    except Refused as why:
        raise UserError(f"{path}: {why}; restore the file or name another run") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); name another run") from None


def is_run(out: Path) -> bool:
    """Says if config.json is Lockstep's, of any version: other tools have files of that name."""
    try:
        return "lockstep" in _content(out / "config.json")
    except UserError:
        return False


def _writing(out: Path, field: str = "--out") -> contextlib.AbstractContextManager[None]:
    return durable.writing(f"{field} {out}", "name another directory")
