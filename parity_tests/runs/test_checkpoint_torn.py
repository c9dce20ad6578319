"""A save that is cut short, by a kill or by the disk, leaves the old checkpoint or the new one."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from lockstep.errors import UserError
from lockstep.model.params import Arrays
from lockstep.model.state import TrainState
from lockstep.run import checkpoint
from lockstep.run.checkpoint import latest, listing, load, save
from lockstep.run.record import FILES, RECORD
from parity_tests.runs.checkpoints import arrays, assert_same, hidden, silent, state

CALLS = [(os, "fsync"), (os, "rename"), (shutil, "rmtree")]


class Killed(BaseException):
    """Stands for SIGKILL: nothing in Lockstep catches it."""


def kill_at(monkeypatch: pytest.MonkeyPatch, moment: int) -> Callable[[], int]:
    """Raises Killed before (even moments) or after (odd) the n-th call; counts the moments."""
    passed = 0

    def wrap(module: object, name: str) -> None:
        real = getattr(module, name)

        def call(*args: object, **kwargs: object) -> None:
            nonlocal passed
            for run in (lambda: None, lambda: real(*args, **kwargs)):
                run()
                passed += 1
                if passed == moment:
                    raise Killed

        monkeypatch.setattr(module, name, call)

    for module, name in CALLS:
        wrap(module, name)
    return lambda: passed


def count_moments(run: Path, saved: TrainState, keep: int) -> int:
    with pytest.MonkeyPatch.context() as monkeypatch:
        count = kill_at(monkeypatch, -1)
        save(run, saved, keep=keep)
        return count()


@pytest.mark.parametrize("step", [20, 10], ids=["next step", "same step"])
def test_a_kill_at_any_moment_leaves_the_old_or_the_new(tmp_path: Path, step: int) -> None:
    old, new = state(10), replace(state(step), params=arrays(99))

    def started(name: str) -> Path:
        save(tmp_path / name, state(5), keep=2)
        save(tmp_path / name, old, keep=2)
        return tmp_path / name

    moments = count_moments(started("whole"), new, 1)
    assert moments >= 20
    outcomes = []
    for moment in range(1, moments + 1):
        run = started(str(moment))
        with pytest.MonkeyPatch.context() as monkeypatch:
            kill_at(monkeypatch, moment)
            with pytest.raises(Killed):
                save(run, new, keep=1)
        for path in listing(run):
            load(path)  # nothing that is listed is torn
        found = latest(run, silent)
        outcomes.append(found.params["plain"].tobytes() == new.params["plain"].tobytes())
        assert_same(found, new if outcomes[-1] else old)
        after = save(run, new, keep=1)  # the next save clears up, wherever the last one died
        assert listing(run) == [after] and hidden(run) == []
        assert_same(load(after), new)
    assert outcomes == sorted(outcomes) and {*outcomes} == {False, True}


def test_a_kill_while_writing_a_file_leaves_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(tensors: Arrays, file: Path) -> None:
        save_file(tensors, file)
        os.truncate(file, 100)
        raise Killed

    save(tmp_path, state(10), keep=1)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "save_file", half)
        with pytest.raises(Killed):
            save(tmp_path, state(20), keep=1)
    assert hidden(tmp_path) == [".tmp-step_00000020"]
    assert_same(latest(tmp_path, silent), state(10))


def test_every_file_and_folder_is_synced_before_the_name_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[int | str] = []
    fsync, rename = os.fsync, os.rename

    def logged_fsync(descriptor: int) -> None:
        log.append(os.fstat(descriptor).st_ino)  # renaming does not change it
        fsync(descriptor)

    def logged_rename(source: Path, target: Path) -> None:
        log.append(f"{source.name} -> {target.name}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(os, "rename", logged_rename)
    final = save(tmp_path, state(10), keep=1)
    wanted = [tmp_path, *(final / name for name in [*FILES.values(), RECORD]), final]
    assert log == [
        *(path.stat().st_ino for path in wanted),
        ".tmp-step_00000010 -> step_00000010",
        final.parent.stat().st_ino,
    ]


# --- a disk that does not take it


def test_what_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full, as test_disk.py has it at every byte; here the library's own error, and a file."""

    def nowhere(tensors: Arrays, file: Path) -> None:
        save_file(tensors, file.parent / "no/such/folder")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "save_file", nowhere)
        with pytest.raises(UserError, match="cannot be written .*No such file"):
            save(tmp_path, state(), keep=1)
    (tmp_path / "checkpoints").rmdir()
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(UserError, match="step_00001000: cannot be written .*File exists"):
        save(tmp_path, state(), keep=1)
