"""Runs of the fake twin, in this process or in one of their own, and what they left behind."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest

from lockstep import twin
from lockstep.cli import trainers
from lockstep.data.batch import Batch
from lockstep.model.state import TrainState
from lockstep.process import ONE_THREAD, ROOT
from lockstep.run import checkpoint, runlog
from lockstep.run.saver import Saver
from lockstep.twin import StepResult
from parity_tests import fake
from parity_tests.fake import FakeTwin

STEPS = 12
SHAPE = "--model tiny --n-layer 1 --d-model 8 --n-head 1 --context 8"
SMALL = f"{SHAPE} --batch-size 2 --accum 1 --remat none --eval-batches 1 --policy fp32"
SMALL += f" --data text.txt --steps {STEPS}"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a text, where "fake" is a framework and no disk is too slow for its steps."""
    monkeypatch.chdir(tmp_path)
    save_at_once(monkeypatch)
    monkeypatch.setitem(twin.MODULES, "fake", fake.__name__)
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 40)
    return tmp_path


def save_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Saver.save

    def save(self: Saver, state: TrainState, losses: Mapping[int, float]) -> None:
        usual(self, state, losses)
        futures.wait([write.future for write in self.writes])

    monkeypatch.setattr(Saver, "save", save)


def train(extra: str = "", out: str = "run") -> int:
    return trainers.train("fake", [*SMALL.split(), "--out", out, *extra.split()])


def resume(extra: str = "", out: str = "run") -> int:
    return trainers.train("fake", ["--resume", "--out", out, *extra.split()])


def rows(kind: str = "train", out: str = "run") -> list[dict[str, Any]]:
    return [row for row in runlog.rows(Path(out, "log.jsonl")) if row["kind"] == kind]


def saved_steps(out: str = "run") -> list[int]:
    return [int(path.name.removeprefix("step_")) for path in checkpoint.listing(Path(out))]


def at_step(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], object]) -> None:
    """`act` is called within the twin's step of this number."""
    usual = FakeTwin.step

    def step(self: FakeTwin, window: Batch) -> Callable[[], StepResult]:
        if self.now.step + 1 == number:
            act()
        return usual(self, window)

    monkeypatch.setattr(FakeTwin, "step", step)


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def places_of_two(framework: str) -> list[dict[str, str]]:
    """The environments of the two processes of a run."""
    port = free_port()
    together, number = {
        "torch": ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}, "RANK"),
        "jax": ({"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": "2",
                 "JAX_NUM_CPU_DEVICES": "1"}, "JAX_PROCESS_ID"),
    }[framework]  # fmt: skip
    return [{**ONE_THREAD, **together, number: str(rank)} for rank in range(2)]


@pytest.fixture
def process(place: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """Starts the fake trainer as a process of its own, 20 ms a step."""
    started: list[subprocess.Popen] = []

    def start(extra: str = "", **options: Any) -> subprocess.Popen:
        command = [sys.executable, "-m", fake.__name__, *SMALL.split(), "--out", "run"]
        environment = os.environ | {"PYTHONPATH": str(ROOT), **options.pop("env", {})}
        piped = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(
            subprocess.Popen([*command, *extra.split()], env=environment, **{**piped, **options})
        )
        return started[-1]

    yield start
    for child in started:
        child.kill()
        child.communicate()
