"""Trackers: a run's scalars, given to another tool. No tracker can stop a run or slow it.

Each runs in a thread of its own, which imports its package, and gets rows through a bounded queue.
One that raises, or lets the queue fill, is left behind: the run says so once and goes on.
"""

import importlib
import importlib.util
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from lockstep.config import Config
from lockstep.errors import UserError, require

WAITING = 1000  # rows at most
FLUSHES = 5.0  # seconds between two, which wait for the disk
PATIENCE = 10.0  # seconds for what waits when the run ends
PROJECT = "lockstep"
Row = dict[str, Any]


class Run(NamedTuple):
    """What a tracker is told of a run."""

    folder: Path
    config: Config

    @property
    def settings(self) -> dict[str, Any]:
        return {k: v for fields in self.config.to_json().values() for k, v in fields.items()}


class Backend(Protocol):
    """A tool; every method may raise, or never return."""

    def log(self, step: int, scalars: dict[str, float]) -> None: ...

    def finish(self) -> None: ...


class Tensorboard:
    """Event files in the run's folder, which `tensorboard --logdir` shows.

    Without the package's SummaryWriter, which has another thread: a full disk ends that one with a
    traceback, and whoever closes the writer waits for ever.
    """

    def __init__(self, run: Run) -> None:
        folder = run.folder / "tensorboard"
        folder.mkdir(exist_ok=True)
        files = importlib.import_module("tensorboardX.event_file_writer")
        self.proto = importlib.import_module("tensorboardX.proto.event_pb2")
        self.writer, self.flushed = files.EventsWriter(str(folder / "events")), time.monotonic()

    def log(self, step: int, scalars: dict[str, float]) -> None:
        event = self.proto.Event(wall_time=time.time(), step=step)
        for name, value in scalars.items():
            event.summary.value.add(tag=name, simple_value=value)
        self.writer.write_event(event)
        if time.monotonic() - self.flushed > FLUSHES:
            self.writer.flush()
            self.flushed = time.monotonic()

    def finish(self) -> None:
        self.writer.close()


class Trackio:
    def __init__(self, run: Run) -> None:
        self.module = importlib.import_module("trackio")
        self.module.init(project=PROJECT, name=run.folder.name, config=run.settings)

    def log(self, step: int, scalars: dict[str, float]) -> None:
        self.module.log(scalars, step=step)

    def finish(self) -> None:
        self.module.finish()


class Wandb:
    """Offline, unless the environment says otherwise: a run asks for no network."""

    def __init__(self, run: Run) -> None:
        module = importlib.import_module("wandb")
        self.run = module.init(
            project=PROJECT, name=run.folder.name, dir=str(run.folder), config=run.settings,
            mode=os.environ.get("WANDB_MODE", "offline"),
        )  # fmt: skip

    def log(self, step: int, scalars: dict[str, float]) -> None:
        self.run.log(scalars, step=step)

    def finish(self) -> None:
        self.run.finish()


class Mlflow:
    """Where MLFLOW_TRACKING_URI says, or in mlflow's local default."""

    def __init__(self, run: Run) -> None:
        self.module = importlib.import_module("mlflow")
        self.module.set_experiment(PROJECT)
        self.module.start_run(run_name=run.folder.name)
        self.module.log_params(run.settings)

    def log(self, step: int, scalars: dict[str, float]) -> None:
        self.module.log_metrics(scalars, step=step)

    def finish(self) -> None:
        self.module.end_run()


BACKENDS: dict[str, tuple[str, Callable[[Run], Backend]]] = {  # name: its package, its class
    "tensorboard": ("tensorboardX", Tensorboard),
    "trackio": ("trackio", Trackio),
    "wandb": ("wandb", Wandb),
    "mlflow": ("mlflow", Mlflow),
}


def require_installed(name: str) -> None:
    """Raises UserError: it is unknown, or its package is not installed."""
    require(name in BACKENDS, "--track", name, f"unknown; use {', '.join(BACKENDS)}")
    package = BACKENDS[name][0]
    if importlib.util.find_spec(package) is None:
        remedy = f"pip install 'lockstep-gpt[{name}]'"
        raise UserError(f"--track {name}: needs the package {package}; {remedy}")


class Tracker:
    def __init__(self, name: str, run: Run, say: Callable[[str], None]) -> None:
        self.name, self.run, self.say = name, run, say
        self.rows: queue.Queue[Row | None] = queue.Queue(WAITING)
        self.problem = ""
        self.left_behind = False
        self.thread = threading.Thread(target=self._work, daemon=True, name=f"track {name}")
        self.thread.start()

    def put(self, row: Row | None) -> None:
        """Waits for nothing; None is the end."""
        try:
            if not self.problem and not self.left_behind:
                self.rows.put_nowait(row)
        except queue.Full:
            self.problem = f"{WAITING} rows wait for it"
        self._report()

    def close(self) -> None:
        self.put(None)
        if not self.left_behind:
            self.thread.join(PATIENCE)
            if self.thread.is_alive():
                self.problem = f"it did not end within {PATIENCE:g} s"
            self._report()

    def _report(self) -> None:
        if self.problem and not self.left_behind:
            self.left_behind = True
            self.say(f"--track {self.name}: {self.problem}; the run goes on without it")

    def _work(self) -> None:
        try:
            backend = BACKENDS[self.name][1](self.run)
            while (row := self.rows.get()) is not None:
                if values := scalars(row):
                    backend.log(row["step"], values)
            backend.finish()
        except BaseException as error:  # SystemExit, too: some tools end the process
            self.problem = f"{type(error).__name__}: {error}"[:300]


class Trackers:
    """Those of a run, for as long as it goes on."""

    def __init__(self, names: Sequence[str], run: Run, say: Callable[[str], None]) -> None:
        self.each = [Tracker(name, run, say) for name in names]

    def put(self, row: Row) -> None:
        for tracker in self.each:
            tracker.put(row)

    def __enter__(self) -> "Trackers":
        return self

    def __exit__(self, *exc: object) -> None:
        for tracker in self.each:
            tracker.close()


def scalars(row: Row) -> dict[str, float]:
    """A row of the log under the names that every tracker gets; only what is finite."""

    def numbers() -> Iterator[tuple[str, float]]:
        for name, value in row.items():
            if name not in ("kind", "step", "seconds") and value is not None:
                yield (f"norm.{name}" if row["kind"] == "norms" else name), float(value)

    if row["kind"] == "spike":
        return {"spike": float(row["loss"])}
    return {name: value for name, value in numbers() if math.isfinite(value)}
