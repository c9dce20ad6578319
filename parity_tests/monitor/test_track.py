"""Trackers get the log's numbers; one that raises, hangs or fills the disk stops no run."""

import errno
import json
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lockstep.exits import DONE
from lockstep.train import track
from parity_tests.runs.fake_runs import STEPS, rows, train


class Wandb(ModuleType):
    """Writes down what is called, by the documented names alone."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = object()  # type: ignore[assignment]
        self.calls = list[tuple[str, tuple[Any, ...], dict[str, Any]]]()

    def __getattr__(self, name: str) -> Any:
        if name not in ("init", "log", "finish"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> "Wandb":
            self.calls.append((name, args, kwargs))
            return self

        return call


def expected() -> list[tuple[int, dict[str, float]]]:
    """The numbers of the log, in its order."""
    lines = [json.loads(line) for line in Path("run/log.jsonl").read_text().splitlines()]
    left_out = ("kind", "step", "seconds")
    return [
        (row["step"], {k: float(v) for k, v in row.items() if k not in left_out and v is not None})
        for row in lines
    ]


def test_wandb_gets_the_log_s_numbers(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    package = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", package)
    assert train("--track wandb") == DONE
    found = [(kw["step"], args[0]) for called, args, kw in package.calls if called == "log"]
    assert found == expected() and len(found) == STEPS + 2
    assert {"loss", "grad_norm", "lr", "loss_scale", "skipped", "tokens_per_second",
            "peak_bytes"} <= found[1][1].keys()  # fmt: skip
    assert found[0][1].keys() == {"val_loss"}
    names = [called for called, _, _ in package.calls]
    assert names[0] == "init" and names[-1] == "finish"
    assert package.calls[0][2]["mode"] == "offline"


def records(file: Path) -> Iterator[bytes]:
    """TFRecord: length, its checksum, data, its checksum."""
    content = file.read_bytes()
    while content:
        (size,) = struct.unpack("<Q", content[:8])
        yield content[12 : 12 + size]
        content = content[16 + size :]


def test_tensorboard_s_files_have_them(place: Path) -> None:
    """By the real package, read back by its own definition of an event."""
    assert train("--track tensorboard") == DONE
    from tensorboardX.proto.event_pb2 import Event

    (file,) = Path("run/tensorboard").iterdir()
    events = [Event.FromString(record) for record in records(file)]
    found = [(e.step, v.tag, v.simple_value) for e in events for v in e.summary.value]
    wanted = [(step, name, value) for step, row in expected() for name, value in row.items()]
    assert [each[:2] for each in found] == [each[:2] for each in wanted]
    assert all(abs(a[2] - b[2]) <= 1e-6 * abs(b[2]) for a, b in zip(found, wanted))  # float32
    assert train("--overwrite") == DONE and not Path("run/tensorboard").exists()


class Broken:
    """A tracker that fails at step 4, or never; `release` ends one that hangs."""

    def __init__(self, how: str) -> None:
        self.how, self.release, self.steps = how, threading.Event(), list[int]()
        self.waited_for = False

    def open(self, folder: Path, settings: track.Row) -> track.Tool:
        if self.how == "at the begin":
            raise ImportError("no such symbol")
        return self.log, lambda: None

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.steps.append(step)
        if step == 4:
            if self.how.startswith("hangs"):
                self.waited_for = not self.release.wait(60)
            if self.how == "full":
                raise OSError(errno.ENOSPC, "No space left on device")
            if self.how == "exits":
                sys.exit(3)
            raise RuntimeError("a tracker's bug")


HOW = {
    "raises": "RuntimeError: a tracker's bug",
    "hangs": "rows wait for it",
    "hangs at the end": "did not end within",
    "full": "No space left on device",
    "exits": "SystemExit: 3",
    "at the begin": "ImportError: no such symbol",
}


@pytest.mark.parametrize("how", HOW)
def test_no_tracker_stops_a_run(
    how: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    broken = Broken(how)
    monkeypatch.setitem(track.TOOLS, "broken", ("json", broken.open))
    monkeypatch.setattr(track, "PATIENCE", 0.2 if how.startswith("hangs") else 60)
    if how == "hangs":
        monkeypatch.setattr(track, "WAITING", 3)
    assert train("--track broken") == DONE and not broken.waited_for
    out = capsys.readouterr().out
    warned = [line for line in out.splitlines() if line.startswith("--track broken")]
    assert len(warned) == 1 and HOW[how] in warned[0] and "goes on without it" in warned[0]
    assert [row["step"] for row in rows()] == list(range(1, STEPS + 1))
    broken.release.set()
