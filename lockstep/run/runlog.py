"""A run's log: `log.jsonl`, and plain lines or a progress bar on the console."""

import contextlib
import json
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from lockstep.config import MOST_STEPS
from lockstep.errors import UserError, printable, why
from lockstep.files import durable, untrusted

LINE_LIMIT = 10_000  # bytes; a row has some 350
LOG_LIMIT = 500_000_000  # bytes, of more than a million steps; its rows are held in memory
TAIL = 50_000  # bytes, of some 140 rows
# Kind of row -> what it must have beside its step, and of which type; null is what was not finite.
ROWS: dict[str, dict[str, tuple[type, ...]]] = {
    "train": {
        "loss": (float, type(None)), "grad_norm": (float, type(None)), "lr": (float,),
        "loss_scale": (float,), "skipped": (bool,),
    },
    "eval": {"val_loss": (float, type(None))},
    "norms": {},
}  # fmt: skip
NUMBERS = (int, float, bool, type(None))  # the rest of it


class RunLog:
    """Appends rows to a JSONL file.

    Each is passed to the system at once, so that a killed run loses none; those that the disk has
    no room for wait in memory for the next try.
    """

    def __init__(self, path: Path, *, last_step: int) -> None:
        """Opens the log; drops rows after `last_step`, the step of the resumed checkpoint.

        Raises:
            UserError: the file cannot be written.
        """
        self.path = path
        self.waiting, self.lock = b"", threading.Lock()  # a checkpoint's writer calls `sync`
        self.written = b""  # since the last fsync: after one that fails nobody knows what is there
        self.problem = ""  # why rows wait
        self.listeners: list[Callable[[dict[str, Any]], None]] = []  # each gets every row
        self.kept = up_to(path, last_step)
        try:
            durable.replace(path, "".join(json.dumps(row) + "\n" for row in self.kept))
            self.descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
            self.safe = os.fstat(self.descriptor).st_size  # bytes that are on the disk
        except OSError as error:
            raise UserError(self._unwritable(error)) from None

    def write(self, row: dict[str, Any]) -> None:
        """Write a row: floats by `repr`, NaN and infinity as null, which JSON lacks."""
        finite = {
            k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()
        }
        with self.lock:
            self.waiting += (json.dumps(finite) + "\n").encode()
            self._flush()
        for listen in self.listeners:
            listen(row)

    def sync(self) -> None:
        """Write all rows to the disk (fsync).

        Raises:
            UserError: it has no room for them, or fails.
        """
        with self.lock:
            self._flush()
            if self.problem:
                raise UserError(self.problem)
            written = len(self.written)
        try:
            os.fsync(self.descriptor)
        except OSError as error:  # where room is taken only now, as on NFS
            with self.lock, contextlib.suppress(OSError):
                os.ftruncate(self.descriptor, self.safe)
                self.waiting, self.written = self.written + self.waiting, b""
            raise UserError(self._unwritable(error)) from None
        with self.lock:
            self.safe, self.written = self.safe + written, self.written[written:]

    def _flush(self) -> None:
        """Write waiting rows; if the system takes only a part, the rest goes first next time."""
        try:
            while self.waiting:
                taken = os.write(self.descriptor, self.waiting)
                self.written += self.waiting[:taken]
                self.waiting = self.waiting[taken:]
            self.problem = ""
        except OSError as error:
            self.problem = self._unwritable(error)

    def _unwritable(self, error: OSError) -> str:
        return f"{self.path}: cannot be written ({error.strerror}); make room there"

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self.descriptor)


def rows(path: Path, *, tail: bool = False) -> Iterator[dict[str, Any]]:
    """Read the valid rows of a log.jsonl; skip torn and invalid lines.

    Args:
        tail: the last `TAIL` bytes of it, which is quick.

    Raises:
        UserError: it is no file of at most `LOG_LIMIT` bytes, or cannot be read.
    """
    try:
        with untrusted.open_regular(path, limit=LOG_LIMIT) as stream:
            if tail:
                stream.seek(max(0, os.fstat(stream.fileno()).st_size - TAIL))
            yield from filter(None, map(_parse_row, _lines(stream)))
    except FileNotFoundError:
        return
    except (OSError, untrusted.Refused) as error:
        raise UserError(f"{path}: cannot be read ({why(error)}); move it elsewhere") from None


def up_to(path: Path, step: int) -> list[dict[str, Any]]:
    """Select the rows up to a step, after which a run continues."""
    return [row for row in rows(path) if row["step"] <= step] if step else []


def _lines(stream: BufferedReader) -> Iterator[bytes]:
    """Read pieces of up to `LINE_LIMIT` bytes: a line may be the whole file."""
    return iter(partial(stream.readline, LINE_LIMIT), b"")


def _parse_row(line: bytes) -> dict[str, Any] | None:
    try:
        row = untrusted.parse_json(line)
    except untrusted.Refused:
        return None
    return row if type(row) is dict and _is_row(row) else None


def _is_row(row: dict[str, Any]) -> bool:
    """Says if it has the fields of its kind, in their types, and otherwise numbers alone."""
    kind, step = row.get("kind"), row.get("step")
    needed = ROWS.get(kind) if type(kind) is str else None
    return (
        needed is not None
        and type(step) is int
        and 0 <= step <= MOST_STEPS
        and all(name in row and type(row[name]) in types for name, types in needed.items())
        and all(type(value) in NUMBERS for name, value in row.items() if name != "kind")
    )


class _Console(Console):
    abandoned = False  # whether the reader of stdout has gone

    def on_broken_pipe(self) -> None:
        """Silences output after a broken pipe (`| head`): rich would end the process, unsaved."""
        self.quiet = self.abandoned = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Display:
    """A progress bar with ETA on a terminal, otherwise a plain line now and then."""

    def __init__(self, steps: int, done: int, *, quiet: bool = False) -> None:
        """
        Args:
            quiet: whether nothing is shown.
        """
        # rich would also take FORCE_COLOR, which some CI sets, for a terminal.
        self.console = _Console(
            file=sys.stdout,
            force_terminal=sys.stdout.isatty(),
            soft_wrap=True,
            markup=False,
            emoji=False,
            highlight=False,
            quiet=quiet,
        )
        self.live = self.console.is_terminal and not self.console.is_dumb_terminal
        self.every = max(1, steps // 20)
        self.steps = steps
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[last]}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.live,
        )
        self.task = self.progress.add_task("training", total=steps, completed=done, last="loss -")

    def __enter__(self) -> "Display":
        self.progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.progress.stop()

    @property
    def abandoned(self) -> bool:
        """Says if the reader of stdout has gone."""
        return self.console.abandoned

    def show_cursor(self) -> None:
        """Show the terminal's cursor again, which a bar hides."""
        self.console.show_cursor()

    def say(self, line: str) -> None:
        self.console.print(printable(line, keep="\n\t"))

    def train(self, row: dict[str, Any], eta: float) -> None:
        step = row["step"]
        loss = f"loss {row['loss']:.4f}"
        self.progress.update(self.task, completed=step, last=loss)
        if not self.live and (step % self.every == 0 or step in (1, self.steps)):
            place = f"step {step:>{len(str(self.steps))}}/{self.steps}"
            numbers = f"{loss}  lr {row['lr']:.2e}  grad norm {row['grad_norm']:.3f}"
            speed = f"{row['tokens_per_second']:,.0f} tokens/s"
            self.say(f"{place}  {numbers}  {speed}  ETA {clock(eta)}")


def clock(seconds: float) -> str:
    """1:02:03, or 2:03 under an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
