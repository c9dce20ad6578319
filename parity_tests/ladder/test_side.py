"""A side's process: what it answers is its own, and its end is one line."""

import os
import socket
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.config import Config, from_flags
from lockstep.config.mesh import Mesh
from lockstep.errors import UserError
from lockstep.model.params import Arrays
from lockstep.parity import nursery
from lockstep.parity.side import Side
from lockstep.parity.world import World
from parity_tests.ladder.conv import CONV


@pytest.fixture
def side() -> Iterator[Side]:
    with closing(Side("torch", CONV.modules["torch"], remember=False)) as side:
        yield side


def config() -> Config:
    flags = {"model": "tiny", "context": 64, "vocab": 256, "batch_size": 2, "policy": "fp64"}
    return from_flags({**flags, "device": "cpu"}, accelerator=False)


def loss(side: Side) -> float:
    batch = CONV.window(config(), 0)
    return float(side.loss_and_grads(config(), CONV.initial(config()), batch)[0][0])


def test_a_mutant_ends_with_its_process(side: Side) -> None:
    """Forked from one nursery, before and after: no mutant is left in another's process."""
    sound = loss(side)
    with closing(side.mutant("other-epsilon")) as mutant:
        assert loss(mutant) != sound
    with closing(side.mutant("other-momentum")) as harmless:  # to a loss
        assert loss(harmless) == sound == loss(side)


def test_a_process_that_ends_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    state = CONV.initial(config())
    heard = {"NURSERY": "its own"}  # what started before capfd did writes elsewhere
    with closing(Side("torch", CONV.modules["torch"], environment=heard)) as side:
        with pytest.raises(UserError, match="^torch: its process ended; see above$"):
            side.ask("no such question", config(), state, np.zeros(0))
        assert "AttributeError" in capfd.readouterr().err
        loss(side)  # and the next one is answered by a new process


def test_as_many_nurseries_run_as_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was asked last stays, and one that has died is started again."""
    monkeypatch.setattr(nursery, "running", OrderedDict())
    monkeypatch.setattr(nursery, "RUNNING", 1)

    def fork(name: str) -> subprocess.Popen[bytes]:
        nursery.fork("no.framework", "", {"NURSERY": name}, sys.executable).close()
        (found,) = nursery.running.values()
        return found.process

    first, second, same = map(fork, ("one", "other", "other"))
    assert second is same and (first.poll(), second.poll()) == (0, None)
    second.kill()
    second.wait()
    assert fork("other").poll() is None
    nursery.close()


def test_what_the_environment_has_already_is_no_other_nursery(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nursery, "running", OrderedDict())
    monkeypatch.setenv("THREADS", "1")
    for environment in ({}, {"THREADS": "1"}, {"THREADS": "2"}):
        nursery.fork("no.framework", "", environment, sys.executable).close()
    assert [*nursery.running] == [
        ("no.framework", sys.executable),
        ("no.framework", sys.executable, ("THREADS", "2")),
    ]
    nursery.close()


def test_a_nursery_that_cannot_start_is_one_line() -> None:
    with (
        closing(Side("torch", CONV.modules["torch"], environment={"PYTHONHOME": "/none"})) as side,
        pytest.raises(UserError, match="its process ended"),
    ):
        loss(side)


@pytest.mark.parametrize("when", ["before it is asked", "before it answers"])
def test_a_rank_that_ends_is_named(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two processes the second, with its question unread."""
    ends = [socket.socketpair() for _ in range(2)]
    left = iter(ours for ours, _ in ends)
    monkeypatch.setattr(World, "_fork", lambda *given: next(left))

    def end() -> None:
        ends[1][1].close()

    def exchange(*given: Any) -> tuple[dict[str, Any], Arrays]:
        end()
        return {"loss": [1.0]}, {}

    monkeypatch.setattr(Side, "_exchange", exchange)
    if when == "before it is asked":
        end()
    world = World(Side("torch", CONV.modules["torch"]), Mesh(data=2))
    named = pytest.raises(UserError, match=r"^torch on data=2: rank 1 has ended; see above$")
    with closing(ends[0][1]), closing(world), named:
        world.ask("loss", config(), CONV.initial(config()), np.zeros(0))


def test_a_worker_that_is_at_work_ends_with_who_asked(tmp_path: Path) -> None:
    """It would wait for ever, as one of a world does whose others have ended."""
    told = tmp_path / "process"
    connection = nursery.fork(
        "parity_tests.ladder.stuck", "", {}, sys.executable, {"TOLD": str(told)}
    )
    end = time.monotonic() + 20
    while not (told.exists() and told.read_text()) and time.monotonic() < end:
        time.sleep(0.02)
    worker = int(told.read_text())
    os.kill(worker, 0)
    connection.close()
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < end:
            os.kill(worker, 0)
            time.sleep(0.02)
