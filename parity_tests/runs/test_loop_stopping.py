"""A signal, or a reader that goes away, stops a run after its step; that step is saved."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep import exits
from parity_tests.fake import FakeTwin
from parity_tests.runs.fake_runs import STEPS, at_step, resume, rows, saved_steps, train

pytestmark = pytest.mark.usefixtures("place")


def send(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_after_the_step_and_saves_it(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    before = signal.getsignal(number)
    at_step(monkeypatch, 5, send(number))
    assert train() == exits.STOPPED
    assert (
        "stopped after step 5, which is saved; go on with --resume --out run"
        in capsys.readouterr().out
    )
    assert saved_steps() == [5]
    assert signal.getsignal(number) is before
    assert resume() == exits.DONE
    assert [row["step"] for row in rows()] == list(range(1, STEPS + 1))


def test_a_signal_during_an_evaluation_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes when it is decided already that this step is not saved."""
    monkeypatch.setattr(FakeTwin, "evaluate", lambda self, _: (send(signal.SIGTERM)(), 1.0)[1])
    assert train() == exits.STOPPED
    assert saved_steps() == [1]  # the evaluation before step 1 was the first


def test_an_ignored_signal_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under nohup, or behind `&` in a script."""
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        at_step(monkeypatch, 5, send(signal.SIGINT))
        assert train() == exits.DONE
    finally:
        signal.signal(signal.SIGINT, former)


def test_a_signal_in_the_last_step_ends_a_whole_run(monkeypatch: pytest.MonkeyPatch) -> None:
    at_step(monkeypatch, STEPS, send(signal.SIGTERM))
    assert train() == exits.DONE
    assert saved_steps() == [STEPS]


def test_a_second_signal_ends_the_process_at_once(process: Callable[..., Any]) -> None:
    """Within a long step, and without a traceback."""
    child = process("--steps 1000 --save-every 0", env={"FAKE_STEP": "600"})
    while "step 0" not in child.stdout.readline():
        pass
    for _ in range(100):  # two, as soon as it has seen them one by one
        if child.poll() is None:
            child.send_signal(signal.SIGINT)
            time.sleep(0.1)
    assert child.returncode == -signal.SIGINT
    assert child.communicate()[1] == ""
    assert saved_steps() == []


def test_ctrl_c_before_the_loop_ends_the_process_at_once(process: Callable[..., Any]) -> None:
    """A shell calls that status 130; nothing is written."""
    child = process(env={"FAKE_PREPARE": "600"})
    assert child.stderr.readline() == "preparing\n"
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=300)
    assert (child.returncode, err) == (-signal.SIGINT, "")
    assert not Path("run").exists()


def test_a_reader_that_goes_away_stops_the_run_and_saves(process: Callable[..., Any]) -> None:
    """As in `python -m jax_impl.train | head`."""
    child = process("--steps 100000")
    child.stdout.readline()
    child.stdout.close()
    assert child.wait(timeout=300) == exits.STOPPED
    assert child.stderr.read() == ""
    assert saved_steps() == [rows()[-1]["step"]]
