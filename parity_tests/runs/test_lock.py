"""Two trainers on one run: the second is refused, and no crash leaves a lock behind."""

import contextlib
import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep import exits
from lockstep.errors import UserError
from lockstep.run import checkpoint, lock
from parity_tests.runs.fake_runs import at_step, resume, rows, saved_steps, train

pytestmark = pytest.mark.usefixtures("place")


def start_child(process: Callable[..., Any]) -> subprocess.Popen:
    child = process("--steps 100000 --save-every 1 --warmup 0")
    while not saved_steps():
        assert child.poll() is None, child.communicate()
        time.sleep(0.02)
    return child


def test_the_second_is_refused_and_writes_nothing_until_the_first_is_gone(
    process: Callable[..., Any], capsys: Any
) -> None:
    child = start_child(process)
    child.send_signal(signal.SIGSTOP)  # so that nobody else writes either
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    for second in (lambda: resume("--steps 2000"), lambda: train("--overwrite")):
        assert second() == exits.MISTAKE
        line = capsys.readouterr().err
        assert line.startswith(f"error: run: is being trained by process {child.pid} on ")
        assert line.endswith("; stop it first or name another run\n")
    assert before == {p: p.read_bytes() for p in Path("run").rglob("*") if p.is_file()}
    child.send_signal(signal.SIGKILL)
    child.wait()
    reached = saved_steps()[-1]
    assert resume(f"--steps {reached + 3}") == exits.DONE
    steps = [row["step"] for row in rows()]
    assert steps == list(range(1, reached + 4))


def test_a_run_that_went_on_meanwhile_is_not_resumed(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """While ours compiled, another trainer came and went."""
    assert train("--steps 6 --warmup 0") == exits.DONE
    hold_lock = lock.hold_lock

    def late(run: Path) -> Any:
        state = checkpoint.latest(run, print)
        checkpoint.save(run, type(state)(**{**vars(state), "step": 7}), keep=2)
        return hold_lock(run)

    monkeypatch.setattr(lock, "hold_lock", late)
    assert resume("--steps 9") == exits.MISTAKE
    assert "run: another trainer continued it meanwhile; try again" in capsys.readouterr().err


def test_a_lock_is_free_again_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    at_step(monkeypatch, 5, lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        train("--save-every 2")
    with lock.hold_lock(Path("run")):
        assert lock.is_held(Path("run"))
    lock.require_free(Path("run"))


def test_who_only_looks_is_taken_for_no_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by another who looks, nor by a trainer that begins meanwhile."""
    run, looking = Path("run"), contextlib.ExitStack()
    flock, waited = fcntl.flock, list[float]()

    def look(descriptor: int, kind: int) -> None:
        """Looks as the first one does; another one looks before it is done."""
        flock(descriptor, kind)
        monkeypatch.setattr(lock.fcntl, "flock", flock)
        looking.callback(os.close, os.dup(descriptor))
        assert not lock.is_held(run)

    def wait(seconds: float) -> None:
        if seconds:
            waited.append(seconds)
            looking.close()

    assert train() == exits.DONE
    monkeypatch.setattr(lock.fcntl, "flock", look)
    assert not lock.is_held(run)
    monkeypatch.setattr(lock.time, "sleep", wait)
    with lock.hold_lock(run):
        assert waited == [lock.PAUSE] and lock.is_held(run)


def test_a_lock_is_not_written_through_a_link() -> None:
    assert train() == exits.DONE
    Path("precious").write_text("mine")
    Path("run", "lock").unlink()
    Path("run", "lock").symlink_to("../precious")
    with pytest.raises(UserError, match="run/lock: cannot be written"), lock.hold_lock(Path("run")):
        pass
    assert Path("precious").read_text() == "mine"


def test_a_file_system_without_locks_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(descriptor: int, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(lock.fcntl, "flock", unsupported)
    assert train() == exits.DONE


@pytest.mark.parametrize(("files", "begun"), [
    ({"lock": ""}, True),
    ({"lock": "process 7 on there\n"}, True),
    ({"lock": "", "config.json.tmp": "{"}, True),
    ({"lock": "mine"}, False),
    ({"lock": "", "notes.txt": "mine"}, False),
])  # fmt: skip
def test_what_is_killed_before_it_is_a_run_is_begun_again(
    files: dict[str, str], begun: bool, capsys: Any
) -> None:
    """And what is not a trainer's is left alone."""
    Path("run").mkdir()
    for name, text in files.items():
        Path("run", name).write_text(text)
    if begun:
        with lock.hold_lock(Path("run")):
            assert train() == exits.MISTAKE  # by another, who is not dead
        assert train() == exits.DONE
        return
    assert train() == train("--overwrite") == exits.MISTAKE
    assert "is not a run, but not empty" in capsys.readouterr().err
    assert {name: Path("run", name).read_text() for name in files} == files
