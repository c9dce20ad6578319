"""`lockstep runs`: states, comparison, and that pruning keeps what is needed."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli import commands
from lockstep.errors import UserError
from lockstep.exits import DONE, MISTAKE, STOPPED
from lockstep.monitor import runs
from lockstep.run import checkpoint, lock
from lockstep.run.saver import Saver
from parity_tests.monitor.conftest import make_run
from parity_tests.runs.fake_runs import at_step, saved_steps, train


def say(capsys: Any, *words: str) -> str:
    capsys.readouterr()
    assert commands.main(["runs", *words]) == DONE
    return capsys.readouterr().out


def listed(capsys: Any) -> dict[str, str]:
    """The columns behind each run's name."""
    lines = say(capsys).splitlines()
    return {line.split()[0]: " ".join(line.split()[1:]) for line in lines[1:]}


def crash() -> None:
    raise ZeroDivisionError


def fill_disk(self: Saver, *given: Any) -> None:
    raise UserError("the disk is full")


def test_states(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    seen: list[str] = []
    with monkeypatch.context() as patch:
        at_step(patch, 5, lambda: seen.append(listed(capsys)["finished"]))
        assert train(out="runs/finished") == DONE
    assert seen[0].endswith("3 of 12 0.3333 running")  # a result is read one step late
    with monkeypatch.context() as patch:
        at_step(patch, 7, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert train(out="runs/stopped") == STOPPED
    with monkeypatch.context() as patch:
        at_step(patch, 7, crash)
        with pytest.raises(ZeroDivisionError):
            train("--save-every 4", out="runs/dead")
    with monkeypatch.context() as patch:
        patch.setattr(Saver, "finish", fill_disk)
        assert train("--save-every 4", out="runs/unsaved") == MISTAKE
    (make_run(place / "runs" / "older") / "config.json").write_text('{"lockstep": "0"}')
    found = listed(capsys)
    assert found["finished"] == "fake tiny fp32 12 of 12 0.0833 finished"
    assert found["stopped"].endswith("7 of 12 0.1429 stopped")
    assert found["dead"].endswith("5 of 12 0.2000 dead")
    assert found["unsaved"].endswith("12 of 12 0.0833 dead")
    assert found["older"] == "unreadable"
    assert commands.main(["runs", str(place)]) == DONE  # of which none is a run
    assert "no runs" in capsys.readouterr().out


def test_compare(place: Path, capsys: Any) -> None:
    make_run(place / "runs" / "a", "jax")
    make_run(place / "runs" / "b", "torch", noise=1e-2, steps=41, keep=3)
    make_run(place / "c", "jax", rows=20)
    text = say(capsys, "--compare", "a", "b")
    rows = [line.split() for line in text.splitlines()]
    assert ["setting", "a", "b"] in rows and ["keep", "2", "3"] in rows
    assert ["steps", "40", "41"] in rows
    assert "their losses differ from step 1 on, of 40 that both have" in text
    assert "by more than 0.1 nats: nowhere" in text and "their curves need not match" in text
    text = say(capsys, "--compare", "a", "c")
    assert "settings are the same" in text and "equal bit for bit over 20 steps" in text
    assert "to test whether the gap is rounding, run: lockstep curves A B" in text


def spoil(checkpoint: Path) -> None:
    file = checkpoint / "nu.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")


@pytest.fixture
def saved(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with a checkpoint of each other step; that of step 4 is the best evaluated one."""
    assert train("--save-every 2 --keep 9 --eval-every 4", out="runs/run") == DONE
    log = place / "runs" / "run" / "log.jsonl"
    log.write_text(log.read_text().replace('"val_loss": 0.2', '"val_loss": 0.01'))
    return place / "runs" / "run"


def test_prune_keeps_the_best_and_the_last_good_one(saved: Path, capsys: Any) -> None:
    spoil(checkpoint.listing(saved)[-1])
    (saved / "checkpoints" / ".tmp-step_00000011").mkdir()
    before = saved_steps("runs/run")
    assert before == [2, 4, 6, 8, 10, 12]
    text = say(capsys, "--prune")  # nobody can answer here
    assert "nothing is deleted; --yes deletes 4 checkpoints" in text
    assert saved_steps("runs/run") == before
    assert "deleted: 4 checkpoints" in say(capsys, "--prune", "--yes")
    assert saved_steps("runs/run") == [4, 10, 12]  # the last is damaged, and so nobody's to delete
    assert not list((saved / "checkpoints").glob(".tmp-*"))
    assert checkpoint.is_whole(checkpoint.listing(saved)[1])
    assert "nothing to delete" in say(capsys, "--prune", "--yes")


@pytest.mark.parametrize("answer", ["y", ""])
def test_prune_asks(answer: str, saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(runs, "can_answer", lambda: True)
    monkeypatch.setattr("builtins.input", lambda question: answer)
    assert ("nothing is deleted" in say(capsys, "--prune")) is (answer == "")
    assert saved_steps("runs/run") == ([4, 12] if answer else [2, 4, 6, 8, 10, 12])


def test_prune_leaves_a_run_that_is_trained_or_has_no_good_checkpoint(
    saved: Path, capsys: Any
) -> None:
    before = saved_steps("runs/run")
    with lock.hold_lock(saved):
        assert commands.main(["runs", "--prune", "--yes"]) == DONE
        streams = capsys.readouterr()
        assert "nothing to delete" in streams.out and "is being trained by" in streams.err
    for path in checkpoint.listing(saved):
        spoil(path)
    assert "nothing to delete" in say(capsys, "--prune", "--yes")
    assert saved_steps("runs/run") == before
