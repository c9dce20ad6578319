"""A disk that is full: a clear line, the last good checkpoint intact, no row lost."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save as serialized

from lockstep import exits
from lockstep.errors import UserError
from lockstep.files import durable
from lockstep.model.params import Arrays
from lockstep.model.state import TrainState
from lockstep.run import checkpoint, runlog
from parity_tests.runs.checkpoints import assert_same, hidden, silent
from parity_tests.runs.fake_runs import STEPS, at_step, resume, rows, saved_steps, train

FULL = OSError(28, "No space left on device")


def tiny(step: int) -> TrainState:
    arrays = {"w": np.full(2, step, np.float32)}
    return TrainState(
        params=arrays, mu=arrays, nu=arrays, step=step, updates=step, loss_scale=1.0, good_steps=0
    )


class Disk:
    """Takes so many bytes of a checkpoint's files, then no more."""

    def __init__(self, room: float) -> None:
        self.room = room

    def write(self, path: Path, content: bytes) -> None:
        taken = int(min(self.room, len(content)))
        self.room -= taken
        path.write_bytes(content[:taken])
        if taken < len(content):
            raise FULL


def with_room(monkeypatch: pytest.MonkeyPatch, disk: Disk) -> None:
    def save_file(arrays: Arrays, path: Path) -> None:
        disk.write(path, serialized(arrays))

    def write_text(path: Path, text: str, encoding: str) -> None:
        disk.write(path, text.encode(encoding))

    monkeypatch.setattr(checkpoint, "save_file", save_file)
    monkeypatch.setattr(Path, "write_text", write_text)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # not what is tried here, and slow


def test_full_disk_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full at ten positions from the first byte to the last: in each file, and in the record."""
    endless = Disk(20_000)
    with_room(monkeypatch, endless)
    checkpoint.save(tmp_path, tiny(1), keep=1)
    size = 20_000 - endless.room
    for room in np.linspace(0, size - 1, 10, dtype=int):
        with_room(monkeypatch, Disk(room))
        with pytest.raises(UserError, match="step_00000002: cannot be written .*No space left"):
            checkpoint.save(tmp_path, tiny(2), keep=1)
        assert hidden(tmp_path) == []  # what it took is given back
        assert_same(checkpoint.latest(tmp_path, silent), tiny(1))
    with_room(monkeypatch, Disk(size))
    checkpoint.save(tmp_path, tiny(2), keep=1)
    assert_same(checkpoint.latest(tmp_path, silent), tiny(2))


# --- the log


def short_writes(monkeypatch: pytest.MonkeyPatch, takes: Callable[[], int]) -> None:
    usual = os.write

    def write(descriptor: int, content: bytes) -> int:
        if not (taken := takes()):
            raise FULL
        return usual(descriptor, content[:taken])

    monkeypatch.setattr(runlog.os, "write", write)


def test_rows_wait_for_room_and_are_written_once(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk takes 0 to 6 bytes at a time."""
    dice = np.random.Generator(np.random.Philox(key=1))
    evals = [{"kind": "eval", "step": step, "val_loss": 0.5} for step in range(1, 200)]
    with runlog.RunLog(place / "log.jsonl", last_step=0) as log:
        with monkeypatch.context() as patch:
            short_writes(patch, lambda: int(dice.integers(7)))
            for row in evals:
                log.write(row)
            assert log.problem.endswith("(No space left on device); make room there")
            with pytest.raises(UserError, match="log.jsonl: cannot be written"):
                log.sync()
        log.sync()
        assert log.problem == ""
    assert list(runlog.rows(place / "log.jsonl")) == evals


def test_no_checkpoint_is_without_its_rows(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The log cannot be written from step 3 on, the checkpoints could."""
    with monkeypatch.context() as patch:
        at_step(patch, 3, lambda: short_writes(patch, lambda: 0))
        assert train("--save-every 2") == exits.MISTAKE
    out, err = capsys.readouterr()
    problem = "run/log.jsonl: cannot be written (No space left on device); make room there"
    assert out.count(f"{problem}; until then rows are kept in memory") == 1
    assert saved_steps() == [2]
    assert err.startswith(f"error: step 12 is not saved: {problem}; the last good checkpoint is ")
    assert resume() == exits.DONE
    assert [row["step"] for row in rows()] == list(range(1, STEPS + 1))


def test_a_log_that_the_disk_does_not_take_delays_a_checkpoint(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Some file systems find no room only at fsync, and then keep nothing; here at step 4."""
    usual, log = os.fsync, Path("run/log.jsonl")

    def fsync(descriptor: int) -> None:
        if os.path.samestat(os.fstat(descriptor), log.stat()):
            with log.open("r+b") as file:  # which drops what it was given, and says so once
                file.seek(-10, os.SEEK_END)
                file.write(bytes(10))
            monkeypatch.setattr(os, "fsync", usual)
            raise FULL
        usual(descriptor)

    at_step(monkeypatch, 3, lambda: monkeypatch.setattr(os, "fsync", fsync))
    assert train("--save-every 4 --keep 9") == exits.DONE
    assert [row["step"] for row in rows()] == list(range(1, STEPS + 1))
    problem = "run/log.jsonl: cannot be written (No space left on device); make room there"
    assert f"step 4 is not saved: {problem}; no good checkpoint is " in capsys.readouterr().out
    assert saved_steps() == [8, 12]


# --- config.json


def test_failed_write_leaves_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> None:
        raise FULL

    durable.replace(tmp_path / "config.json", "former")
    monkeypatch.setattr(durable, "sync", full)
    with pytest.raises(OSError, match="No space left"):
        durable.replace(tmp_path / "config.json", "later")
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    assert (tmp_path / "config.json").read_text() == "former"
