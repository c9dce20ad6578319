"""Checkpoints to delete: those older than the last good one."""

from pathlib import Path
from typing import NamedTuple

from lockstep.errors import UserError
from lockstep.run import checkpoint, directory, lock, runlog


class Surplus(NamedTuple):
    run: Path
    paths: list[Path]
    size: int  # bytes


def find_surplus(run: Path) -> Surplus:
    """List a run's checkpoints older than the newest whole one, but for the best evaluated one.

    And what kills left half written.

    Whatever is newer stays: it may be of a later version. A run without a good checkpoint keeps
    all that it has.

    Raises:
        UserError: it is being trained, or its files are not as this version reads them.
    """
    directory.read_record(run)
    lock.require_free(run)
    paths = checkpoint.listing(run)
    good = next((path for path in reversed(paths) if checkpoint.is_whole(path)), None)
    losses = {
        row["step"]: row["val_loss"]
        for row in runlog.rows(run / "log.jsonl")
        if row["kind"] == "eval" and row["val_loss"] is not None
    }
    best = checkpoint.best_of(paths, losses)
    older = paths[: paths.index(good)] if good else []
    surplus = [path for path in older if path != best]
    surplus += [path for path in (run / "checkpoints").glob(".tmp-*") if not path.is_symlink()]
    size = sum(file.lstat().st_size for path in surplus for file in path.rglob("*"))
    return Surplus(run, surplus, size)


def remove(surplus: Surplus) -> None:
    """Delete checkpoints while holding the run's lock, so that no trainer starts.

    Raises:
        UserError: somebody trains it by now, or it cannot be written.
    """
    with lock.hold_lock(surplus.run):
        for path in surplus.paths:
            try:
                checkpoint.delete(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                problem = f"cannot be deleted ({error.strerror}); make the run writable"
                raise UserError(f"{path}: {problem}") from None
