"""Trackers: the numbers of a run's log, given to another tool by its own interface.

No tracker can stop a run or slow it. Each runs in a thread of its own, which imports its package
and takes rows from a bounded queue. One that raises, or lets the queue fill, is left behind: the
run says so once and goes on.
"""

import math
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.config import Config
from lockstep.errors import require
from lockstep.extras import require_package

WAITING = 1000  # rows at most
PATIENCE = 10.0  # seconds for what waits when the run ends
PROJECT = "lockstep"
Row = dict[str, Any]
Tool = tuple[Callable[..., Any], Callable[[], Any]]  # log(numbers, step=...), finish()


def open_tensorboard(folder: Path, settings: Row) -> Tool:
    """Write event files into RUN/tensorboard, which `tensorboard --logdir` shows.

    Without the package's SummaryWriter: a full disk ends its thread with a traceback, and whoever
    closes it then waits for ever.
    """
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import RecordWriter

    (folder / "tensorboard").mkdir(exist_ok=True)
    name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}"
    writer = RecordWriter(str(folder / "tensorboard" / name))

    def write(**content: Any) -> None:
        try:
            writer.write(Event(wall_time=time.time(), **content).SerializeToString())
            writer.flush()
        except OSError:
            with suppress(OSError):  # else Python tries to write the rest when it ends
                writer.close()
            raise

    def log(numbers: dict[str, float], *, step: int) -> None:
        values = [{"tag": name, "simple_value": value} for name, value in numbers.items()]
        write(step=step, summary={"value": values})

    write(file_version="brain.Event:2")
    return log, writer.close


def open_wandb(folder: Path, settings: Row) -> Tool:
    """Open wandb, offline unless WANDB_MODE says otherwise: a run needs no network."""
    import wandb

    mode = os.environ.get("WANDB_MODE", "offline")
    run = wandb.init(project=PROJECT, name=folder.name, dir=str(folder), config=settings, mode=mode)
    return run.log, run.finish


TOOLS: dict[str, tuple[str, Callable[[Path, Row], Tool]]] = {  # name: its package, what opens it
    "tensorboard": ("tensorboardX", open_tensorboard),
    "wandb": ("wandb", open_wandb),
}


def require_installed(name: str) -> None:
    """Raises UserError if a tracker is unknown, or its package is not installed."""
    require(name in TOOLS, "--track", name, f"unknown; use {', '.join(TOOLS)}")
    require_package(f"--track {name}", TOOLS[name][0], name)


class Tracker:
    """A tracker, open for as long as a `with` lasts."""

    def __init__(self, name: str, run: Path, config: Config, say: Callable[[str], None]) -> None:
        """
        Args:
            run: the run's folder.
            say: gets one line if the tracker is left behind.
        """
        self.name, self.say = name, say
        self.rows: queue.Queue[Row | None] = queue.Queue(WAITING)
        self.left_behind = False
        self.thread = threading.Thread(
            target=self._work, args=(run, config), daemon=True, name=f"track {name}"
        )
        self.thread.start()

    def put(self, row: Row | None) -> None:
        """Hand over a row of the log, without waiting; None is the end."""
        try:
            if not self.left_behind:
                self.rows.put_nowait(row)
        except queue.Full:
            self._leave_behind(f"{WAITING} rows wait for it")

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, *exc: object) -> None:
        self.put(None)
        self.thread.join(0 if self.left_behind else PATIENCE)
        if self.thread.is_alive():
            self._leave_behind(f"it did not end within {PATIENCE:g} s")

    def _leave_behind(self, problem: str) -> None:
        if not self.left_behind:
            self.left_behind = True
            self.say(f"--track {self.name}: {problem}; the run goes on without it")

    def _work(self, run: Path, config: Config) -> None:
        settings = {k: v for section in config.to_json().values() for k, v in section.items()}
        try:
            log, finish = TOOLS[self.name][1](run, settings)
            while (row := self.rows.get()) is not None:
                if numbers := finite_numbers(row):
                    log(numbers, step=row["step"])
            finish()
        except BaseException as error:  # SystemExit, too: some tools end the process
            self._leave_behind(f"{type(error).__name__}: {error}"[:300])


def finite_numbers(row: Row) -> dict[str, float]:
    """Name the finite numbers of a log's row as every tracker gets them."""
    prefix = "norm." if row["kind"] == "norms" else ""
    return {
        prefix + name: float(value)
        for name, value in row.items()
        if name not in ("kind", "step", "seconds") and value is not None and math.isfinite(value)
    }
