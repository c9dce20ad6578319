"""Checkpoints: every bit comes back, damage is refused in one line, a kill leaves the old or the
new one, rules say which are kept and resumed.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lockstep.errors import UserError
from lockstep.model.params import Arrays
from lockstep.run import checkpoint
from lockstep.run.checkpoint import latest, listing, load, open_state, save
from lockstep.run.record import FIELDS, FILES, FORMAT, RECORD
from parity_tests.runs.checkpoints import (
    DTYPES,
    arrays,
    assert_same,
    hidden,
    refusal,
    rewrite,
    silent,
    state,
)
from parity_tests.tiers import tier


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save(tmp_path, state(), keep=1)


@tier("quick", guard="a checkpoint round trip")
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_comes_back(tmp_path: Path, dtype: str) -> None:
    saved = state(dtype=dtype)
    path = save(tmp_path, saved, keep=1)
    assert path == tmp_path / "checkpoints/step_00001000"
    assert {file.name for file in path.iterdir()} == {RECORD, *FILES.values()}
    assert_same(load(path), saved)
    assert hidden(tmp_path) == [] and checkpoint.is_whole(path)


def test_frozen_weight_has_no_moments(tmp_path: Path) -> None:
    whole = state()
    mu, nu = ({n: x for n, x in y.items() if n != "plain"} for y in (whole.mu, whole.nu))
    saved = replace(whole, mu=mu, nu=nu)
    path = save(tmp_path, saved, keep=1)
    assert_same(load(path), saved)
    assert json.loads((path / RECORD).read_text())["frozen"] == ["plain"]


def test_saved_tensor_is_indexed_like_an_array(path: Path) -> None:
    found, whole = open_state(path).nu, state().nu
    assert found["scalar"][...].tobytes() == whole["scalar"].tobytes()
    for index in (..., slice(1, 2), (slice(2), slice(1, 3)), (slice(None), slice(2, 9)), slice(0)):
        for name in ("plain", "transposed", "permuted"):
            assert found[name][index].shape == whole[name][index].shape
            assert found[name][index].tobytes() == whole[name][index].tobytes()


def test_bfloat16_loads_without_a_framework(tmp_path: Path) -> None:
    path = save(tmp_path, state(dtype="bfloat16"), keep=1)
    code = (
        "import sys; from pathlib import Path; from lockstep.run import checkpoint; "
        "print(checkpoint.load(Path(sys.argv[1])).params['plain'].dtype)"
    )
    command = [sys.executable, "-W", "error", "-c", code, str(path)]
    assert subprocess.run(command, capture_output=True, check=True).stdout == b"bfloat16\n"


# --- damage

NOT_OURS = "damaged or not a Lockstep checkpoint"
UNLIKE = "its tensors are not those of state.json and weights.safetensors"
END = "; use another checkpoint"


def test_other_fields_are_another_format() -> None:
    """Where this fails, raise `FORMAT`: older checkpoints are refused by its number."""
    assert FORMAT == 4
    assert [*FIELDS] == ["format", "step", "updates", "loss_scale", "good_steps", "amaxes",
                         "dtype", "names", "frozen", "sha256"]  # fmt: skip


def field(**changes: Any) -> Callable[[Path], None]:
    """Changes fields of state.json."""
    return lambda path: rewrite(path, lambda record: record.update(changes))


def tensors(name: str, change: Callable[[Arrays], Arrays]) -> Callable[[Path], None]:
    """Changes the tensors of a file, and its checksum with them."""

    def damage(path: Path) -> None:
        save_file(change(load_file(path / name)), path / name)
        rewrite(path)

    return damage


def flip_last_byte(path: Path) -> None:
    content = (path / "weights.safetensors").read_bytes()
    (path / "weights.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "flipped bit": (flip_last_byte, "weights.safetensors: damaged, its checksum is not that"),
    "cut": (lambda path: os.truncate(path / "mu.safetensors", 100), "mu.safetensors: damaged"),
    "empty": (lambda path: os.truncate(path / "nu.safetensors", 0), "nu.safetensors: damaged"),
    "missing": (lambda path: (path / "mu.safetensors").unlink(),
                f"mu.safetensors: cannot be read (No such file or directory){END}"),
    "swapped": (lambda path: shutil.copy(path / "mu.safetensors", path / "nu.safetensors"),
                "nu.safetensors: damaged, its checksum is not that in state.json"),
    "cut record": (lambda path: os.truncate(path / RECORD, 100), f"state.json: {NOT_OURS}"),
    "missing record": (lambda path: (path / RECORD).unlink(), "state.json: cannot be read"),
    "newer": (field(format=FORMAT + 1, more=1),
              "state.json: format 5, this version reads 4; upgrade Lockstep or use another"),
    "older": (field(format=3), "state.json: format 3, this version reads 4; use the commit that "
                               "config.json names or use another"),
    "another field": (field(more=1), f"state.json: {NOT_OURS}{END}"),
    "no field": (lambda path: rewrite(path, lambda record: record.pop("good_steps")),
                 f"state.json: {NOT_OURS}{END}"),
    "no checksum": (field(sha256={}), f"state.json: {NOT_OURS}{END}"),
    "negative": (field(step=-1), f"state.json: {NOT_OURS}{END}"),
    "float for int": (field(step=1.0), f"state.json: {NOT_OURS}{END}"),
    "negative scale": (field(loss_scale=-1.0), f"state.json: {NOT_OURS}{END}"),
    "unknown dtype": (field(dtype="int64"), f"state.json: {NOT_OURS}{END}"),
    "name twice": (field(names=["plain", "plain"]), f"state.json: {NOT_OURS}{END}"),
    "unknown frozen": (field(frozen=["no tensor"]), f"state.json: {NOT_OURS}{END}"),
    "amax shape": (field(amaxes={"a": [[0.0]]}), f"state.json: {NOT_OURS}{END}"),
    "another dtype": (field(dtype="float64"), f"weights.safetensors: {UNLIKE}{END}"),
    "tensor lost": (tensors("mu.safetensors", lambda x: {k: x[k] for k in x if k != "plain"}),
                    f"mu.safetensors: {UNLIKE}{END}"),
    "tensor added": (tensors("nu.safetensors", lambda x: x | {"more": np.zeros(1, np.float32)}),
                     f"nu.safetensors: {UNLIKE}{END}"),
    "tensor shape": (tensors("mu.safetensors", lambda x: x | {"plain": x["plain"].T.copy()}),
                     f"mu.safetensors: {UNLIKE}{END}"),
    "tensor dtype": (tensors("nu.safetensors", lambda x: x | {"plain": np.zeros((3, 5))}),
                     f"nu.safetensors: {UNLIKE}{END}"),
    "integers": (tensors("mu.safetensors", lambda x: x | {"plain": np.zeros((3, 5), np.int32)}),
                 f"mu.safetensors: {NOT_OURS} (plain is of dtype I32"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_refused_in_one_line(path: Path, name: str) -> None:
    rewrite(path)  # which alone is accepted
    assert_same(load(path), state())
    damage, line = DAMAGE[name]
    damage(path)
    assert (said := refusal(path)).startswith(line) and said.endswith(END[2:])


# --- a save that is cut short

CALLS = [(os, "fsync"), (os, "rename"), (shutil, "rmtree")]


class Killed(BaseException):
    """Stands for SIGKILL: nothing in Lockstep catches it."""


def kill_at(monkeypatch: pytest.MonkeyPatch, moment: int) -> Callable[[], int]:
    """Raises Killed before (odd moments) or after (even) the n-th call; counts the moments."""
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


@pytest.mark.parametrize("step", [20, 10], ids=["next step", "same step"])
def test_kill_at_each_fsync_and_rename_leaves_old_or_new(tmp_path: Path, step: int) -> None:
    old, new = state(10), replace(state(step), params=arrays(99))

    def started(name: str) -> Path:
        save(tmp_path / name, state(5), keep=2)
        save(tmp_path / name, old, keep=2)
        return tmp_path / name

    run = started("whole")
    with pytest.MonkeyPatch.context() as monkeypatch:
        moments = kill_at(monkeypatch, -1)
        save(run, new, keep=1)
    assert moments() >= 20
    outcomes = []
    for moment in range(1, moments() + 1):
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


def test_everything_is_synced_before_the_name_appears(
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


def test_failed_write_is_one_line(tmp_path: Path) -> None:
    """A full disk is in test_disk.py."""
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(UserError, match="step_00001000: cannot be written .*File exists"):
        save(tmp_path, state(), keep=1)


# --- which there are, and which one a run goes on from


def names(run: Path) -> list[str]:
    return [path.name for path in listing(run)]


def test_listing_is_sorted_by_step(tmp_path: Path) -> None:
    """It skips what is no checkpoint."""
    assert listing(tmp_path) == []
    folder = tmp_path / "checkpoints"
    wanted = ["step_00000002", "step_00000010.old", "step_00000010", "step_100000000"]
    others = ["step_1", "step_000000001", "step_00000003.bak", ".tmp-step_00000004"]
    for name in [*wanted[::-1], *others]:
        (folder / name).mkdir(parents=True)
    (folder / "step_00000005").write_text("a file")
    assert names(tmp_path) == wanted


def test_keep_deletes_no_later_steps(tmp_path: Path) -> None:
    """A run that went back because step 20 was damaged must not lose step 12 to `keep`."""
    for step, keep, kept in ((8, 2, [8]), (20, 2, [8, 20]), (10, 2, [8, 10, 20]),
                             (11, 2, [10, 11, 20]), (12, 1, [12, 20])):  # fmt: skip
        save(tmp_path, state(step), keep=keep)
        assert names(tmp_path) == [f"step_{each:08d}" for each in kept]
    assert hidden(tmp_path) == []


def test_latest_skips_damaged_checkpoints_with_a_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="it has no checkpoint; use --overwrite to start again"):
        latest(tmp_path, silent)
    for step in (1, 2, 3):
        save(tmp_path, state(step), keep=3)
    newest, newer, good = reversed(listing(tmp_path))
    (newest / RECORD).unlink()
    os.truncate(newer / "mu.safetensors", 10)
    spoilt = [newest / RECORD, newer / "mu.safetensors", good / RECORD]
    for lazy in (False, True):
        lines: list[str] = []
        found = latest(tmp_path, lines.append, lazy=lazy)
        assert found.step == 1
        assert [line.split(": ")[0] for line in lines] == [*map(str, spoilt[:2])]
    (good / RECORD).unlink()
    lines = []
    with pytest.raises(UserError, match="none of its 3 checkpoints loads; use --overwrite"):
        latest(tmp_path, lines.append)
    assert [line.split(": ")[0] for line in lines] == [*map(str, spoilt)]
