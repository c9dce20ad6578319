"""A side's process: what it answers is its own, and its end is one line."""

import signal
import socket
import subprocess
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from lockstep import worker
from lockstep.config import Config, from_flags
from lockstep.config.mesh import Mesh
from lockstep.errors import UserError
from lockstep.parity.side import Side
from lockstep.parity.world import World
from lockstep.worker import Channel, Worker
from lockstep_recorder import wire
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


def test_an_error_has_its_last_frames(capfd: pytest.CaptureFixture[str]) -> None:
    state = CONV.initial(config())
    with closing(Side("torch", CONV.modules["torch"])) as side:
        with pytest.raises(UserError, match="^torch: AttributeError: .*'no such question'"):
            side.ask("no such question", config(), state, np.zeros(0))
        assert "in answer: return getattr(" in capfd.readouterr().err
        loss(side)


def server_process(changes: dict[str, str]) -> subprocess.Popen[bytes]:
    return worker.fork_server("no.service", "", changes).process


def test_as_many_fork_servers_run_as_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was asked last stays, and one that has died is started again."""
    monkeypatch.setattr(worker, "running", OrderedDict())
    monkeypatch.setattr(worker, "RUNNING", 1)
    first, second, same = (server_process({"SERVER": name}) for name in ("a", "b", "b"))
    assert second is same and (first.poll(), second.poll()) == (0, None)
    second.kill()
    second.wait()
    assert server_process({"SERVER": "b"}).poll() is None
    worker.close_servers()


def test_what_the_environment_has_already_is_no_other_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker, "running", OrderedDict())
    monkeypatch.setenv("THREADS", "1")
    processes = [server_process(given) for given in ({}, {"THREADS": "1"}, {"THREADS": "2"})]
    assert processes[0] is processes[1] is not processes[2]
    worker.close_servers()


def test_a_fork_server_that_cannot_start_is_one_line() -> None:
    with (
        closing(Side("torch", CONV.modules["torch"], environment={"PYTHONHOME": "/none"})) as side,
        pytest.raises(UserError, match="its process ended"),
    ):
        loss(side)


@pytest.mark.parametrize("when", ["before it is asked", "before it answers"])
def test_a_rank_that_ends_is_named(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two processes ends with its question unread."""
    ends = [socket.socketpair() for _ in range(2)]
    left = iter(Channel(ours) for ours, _ in ends[::-1])  # the first is asked last
    monkeypatch.setattr(World, "_fork", lambda *given: next(left))
    if when == "before it is asked":
        ends[1][1].close()
    else:
        threading.Timer(0.2, ends[1][1].close).start()
    with ends[0][1].makefile("wb") as first:
        wire.send(first, {"loss": [1.0]}, {})
    world = World(Side("torch", CONV.modules["torch"]), Mesh(data=2))
    named = pytest.raises(UserError, match=r"^torch on data=2: rank 1: its process ended; see")
    with closing(ends[0][1]), closing(world), named:
        world.ask("loss", config(), CONV.initial(config()), np.zeros(0))


def stuck(told: Path, **changes: str) -> Worker:
    service = "parity_tests.ladder.stuck"
    environment = {"TOLD": str(told), **changes}
    return Worker("it", partial(worker.start_service, service, changes=environment))


def send_and_see(asked: Worker, told: Path) -> Channel:
    """Asks what is never answered, and waits until the process is at it."""
    asked.send({"ask": "wait"}, {})
    assert asked.channel and asked.channel.process
    while not (told.exists() and told.read_text()):
        assert asked.channel.process.poll() is None
        time.sleep(0.02)
    return asked.channel


def test_a_worker_that_is_at_work_ends_with_who_asked(tmp_path: Path) -> None:
    """It would wait for ever, as one of a world does whose others have ended."""
    with closing(stuck(tmp_path / "process")) as asked:
        channel = send_and_see(asked, tmp_path / "process")
        channel.connection.shutdown(socket.SHUT_RDWR)  # as when this process is killed
        assert channel.process and channel.process.wait(20) == 1


def test_an_interrupt_ends_what_is_at_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a session of its own, so a terminal's Ctrl-C does not reach it."""

    def interrupt(stream: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(wire, "receive", interrupt)
    with closing(stuck(tmp_path / "process")) as asked:
        asked.send({"ask": "wait"}, {})
        assert asked.channel and (process := asked.channel.process)
        with pytest.raises(KeyboardInterrupt):
            asked.receive()
        assert process.returncode == -signal.SIGKILL


def test_a_worker_that_ends_or_hangs_is_one_line(tmp_path: Path) -> None:
    with closing(stuck(told := tmp_path / "process", CHILD="yes")) as asked:
        with pytest.raises(UserError, match="^it: its process ended with status 3; see above$"):
            asked.ask("leave")
        send_and_see(asked, told)
        with pytest.raises(UserError, match="^it: no answer within 1 s$"):
            asked.receive(seconds=1)
    child = Path("/proc", told.read_text(), "stat")
    for _ in range(3000):  # by itself it would end after ten minutes
        if not is_running(child):
            return
        time.sleep(0.02)
    pytest.fail("its child goes on without it")


def is_running(stat: Path) -> bool:
    """Says if a process on Linux runs: a zombie has ended, whenever its new parent reaps it."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
