"""The runs in a folder, a line each: it reads only the end of a log, so many runs are fast."""

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import UserError, printable
from lockstep.run import checkpoint, directory, lock, runlog

HEAD = ("run", "framework", "model", "policy", "steps", "loss", "state")


def find(folder: Path) -> list[Path]:
    """Finds the runs in a folder, by name.

    Raises:
        UserError: the folder cannot be read.
    """
    try:
        return sorted(path for path in folder.iterdir() if directory.is_run(path))
    except OSError as error:
        problem = f"cannot be read ({error.strerror}); name a folder of runs"
        raise UserError(f"DIR {folder}: {problem}") from None


def summarize(run: Path) -> list[str]:
    """Makes the cells of a run's line, one for each of HEAD.

    Raises:
        UserError: its files are not as this version reads them.
    """
    record = directory.read_record(run)
    config = record.config
    rows = (row for row in runlog.rows(run / "log.jsonl", tail=True) if row["kind"] == "train")
    last: dict[str, Any] = next(iter(deque(rows, maxlen=1)), {"step": 0, "loss": None})
    names = [printable(run.name), printable(record.framework), config.model.model]
    return [
        *names, config.precision.policy, f"{last['step']:,} of {config.optim.steps:,}",
        "" if last["loss"] is None else f"{last['loss']:.4f}",
        state_of(run, last["step"], config.optim.steps),
    ]  # fmt: skip


def state_of(run: Path, step: int, steps: int) -> str:
    """Says if a run is running, finished, stopped or dead.

    Running: a trainer holds its lock; finished: its last step is saved; stopped: the last step that
    it took is saved; dead: the steps since its last checkpoint are lost.
    """
    if lock.is_held(run):
        return "running"
    saved = max(map(checkpoint.step_of, checkpoint.listing(run)), default=0)
    if saved >= steps:
        return "finished"
    return "stopped" if saved and saved >= step else "dead"


def in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in rows]
