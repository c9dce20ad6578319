"""Checkpoints: bit for bit what was saved, and never a torn one, whenever the kill comes."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lockstep import checkpoint
from lockstep.checkpoint import COUNTERS, FILES, RECORD, latest, listing, load, save
from lockstep.errors import UserError
from lockstep.params import Arrays
from lockstep.twin import TrainState

DTYPES: dict[str, Any] = {
    "float64": np.uint64,
    "float32": np.uint32,
    "bfloat16": np.uint16,
    "float16": np.uint16,
}


class Killed(BaseException):
    """Stands for SIGKILL: nothing in Lockstep catches it."""


def arrays(seed: int, dtype: str = "float32") -> Arrays:
    """Every layout that a bridge may hand over, with random bits: NaNs and subnormals too."""
    integers = np.random.Generator(np.random.Philox(seed)).integers
    unsigned = DTYPES[dtype]

    def random(*shape: int) -> np.ndarray:
        bits = integers(0, np.iinfo(unsigned).max, shape, unsigned, endpoint=True)
        return np.asarray(bits).view(dtype)

    return {
        "plain": random(3, 5),
        "transposed": random(4, 3).T,
        "permuted": random(2, 3, 4).transpose(2, 0, 1),
        "strided": random(8)[::2],
        "scalar": random(),
    }


def state(step: int = 1000, dtype: str = "float32") -> TrainState:
    return TrainState(
        params=arrays(3 * step, dtype),
        mu=arrays(3 * step + 1, dtype),
        nu=arrays(3 * step + 2, dtype),
        step=step,
        updates=step - 7,
        loss_scale=0.1 + 2.0**-20,
        good_steps=42,
    )


def assert_same(a: TrainState, b: TrainState) -> None:
    for field in FILES:
        ours, theirs = getattr(a, field), getattr(b, field)
        assert list(ours) == list(theirs)  # the order, too: a sum over tensors depends on it
        for name in ours:
            x, y = ours[name], theirs[name]
            assert (x.dtype, x.shape) == (y.dtype, y.shape), name
            assert x.tobytes() == y.tobytes(), name  # tobytes walks any layout in C order
    counters = [replace(s, params={}, mu={}, nu={}) for s in (a, b)]
    assert counters[0] == counters[1]
    assert [type(c.loss_scale) for c in counters] == [float, float]


def names(run: Path) -> list[str]:
    return [path.name for path in listing(run)]


def hidden(run: Path) -> list[str]:
    return [path.name for path in (run / "checkpoints").glob(".*")]


def refusal(path: Path) -> str:
    """The line that a user reads, without the folder of this test."""
    with pytest.raises(UserError) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(f"{path}/", "")


def silent(line: str) -> None:
    raise AssertionError(line)


# --- round trip


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_comes_back(tmp_path: Path, dtype: str) -> None:
    saved = state(dtype=dtype)
    path = save(tmp_path, saved, keep=1)
    assert path == tmp_path / "checkpoints/step_00001000"
    assert sorted(p.name for p in path.iterdir()) == sorted([*FILES.values(), RECORD])
    assert_same(load(path), saved)
    assert json.loads((path / RECORD).read_text())["dtype"] == dtype


def test_all_bfloat16_values_come_back(tmp_path: Path) -> None:
    every = {"w": np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)}
    path = save(tmp_path, replace(state(), params=every, mu=every, nu=every), keep=1)
    assert np.array_equal(load(path).params["w"].view(np.uint16), np.arange(2**16))


def test_the_comparison_sees_what_safetensors_does_to_a_transposed_view(tmp_path: Path) -> None:
    """The trap that `save` avoids: without a copy in C order the values come back shuffled."""
    saved = state()
    save_file(saved.params, tmp_path / "naive.safetensors")
    loaded = load_file(tmp_path / "naive.safetensors")
    naive = replace(saved, params={name: loaded[name] for name in saved.params})
    with pytest.raises(AssertionError, match="transposed|permuted"):
        assert_same(naive, saved)


def test_bfloat16_loads_in_a_process_that_knows_no_framework(tmp_path: Path) -> None:
    path = save(tmp_path, state(dtype="bfloat16"), keep=1)
    code = (
        "import sys; from pathlib import Path; from lockstep import checkpoint; "
        "print(checkpoint.load(Path(sys.argv[1])).params['plain'].dtype)"
    )
    command = [sys.executable, "-W", "error", "-c", code, str(path)]
    assert subprocess.run(command, capture_output=True, check=True).stdout == b"bfloat16\n"


@pytest.mark.parametrize("scale", [1.0, 2.0**-149, 1 / 3, 1e300, float("inf")])
def test_the_loss_scale_comes_back_exactly(tmp_path: Path, scale: float) -> None:
    path = save(tmp_path, replace(state(), loss_scale=scale), keep=1)
    assert load(path).loss_scale == scale


@pytest.mark.parametrize("field", ["params", "mu", "nu"])
def test_a_state_that_is_not_of_one_kind_is_a_bug(tmp_path: Path, field: str) -> None:
    changes: list[dict[str, Any]] = [
        {field: arrays(0, "float64")},
        {field: {"plain": arrays(0)["plain"]}},
    ]
    mixed: Arrays = {"a": np.zeros(2, np.float32), "b": np.zeros(2)}
    changes.append({"params": mixed, "mu": mixed, "nu": mixed})
    for change in changes:
        with pytest.raises(AssertionError):
            save(tmp_path, replace(state(), **change), keep=1)
    assert listing(tmp_path) == []


# --- listing and pruning


def test_listing_is_by_step_and_skips_what_is_no_checkpoint(tmp_path: Path) -> None:
    assert listing(tmp_path) == []
    folder = tmp_path / "checkpoints"
    wanted = ["step_00000002", "step_00000010.old", "step_00000010", "step_100000000"]
    for name in [
        *wanted[::-1],
        "step_1",
        "step_000000001",
        "step_00000003.bak",
        ".tmp-step_00000004",
    ]:
        (folder / name).mkdir(parents=True)
    (folder / "step_00000005").write_text("a file")
    assert names(tmp_path) == wanted


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (8, 9, 10, 11):
        save(tmp_path, state(step), keep=2)
    assert names(tmp_path) == ["step_00000010", "step_00000011"]
    save(tmp_path, state(12), keep=1)
    assert names(tmp_path) == ["step_00000012"]
    assert hidden(tmp_path) == []


def test_pruning_never_takes_what_was_just_saved_or_is_of_a_later_step(tmp_path: Path) -> None:
    """A run that went back because step 20 was damaged must not lose step 12 to `keep`."""
    for step in (10, 20):
        save(tmp_path, state(step), keep=2)
    for step in (11, 12):
        save(tmp_path, state(step), keep=1)
    assert names(tmp_path) == ["step_00000012", "step_00000020"]


@pytest.mark.parametrize("keep", [1, 2])
def test_saving_a_step_again_replaces_it(tmp_path: Path, keep: int) -> None:
    save(tmp_path, state(), keep=keep)
    again = replace(state(), params=arrays(99))
    path = save(tmp_path, again, keep=keep)
    assert_same(load(path), again)
    assert names(tmp_path) == ["step_00001000"] and hidden(tmp_path) == []


# --- kills


CALLS = [(os, "fsync"), (os, "rename"), (shutil, "rmtree")]


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


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("step", [20, 10], ids=["next step", "same step"])
def test_a_kill_at_any_moment_leaves_the_old_or_the_new(
    tmp_path: Path, step: int, keep: int
) -> None:
    old, new = state(10), replace(state(step), params=arrays(99))

    def started(name: str) -> Path:
        save(tmp_path / name, state(5), keep=2)
        save(tmp_path / name, old, keep=2)
        return tmp_path / name

    moments = count_moments(started("whole"), new, keep)
    assert moments >= 20
    outcomes = []
    for moment in range(1, moments + 1):
        run = started(str(moment))
        with pytest.MonkeyPatch.context() as monkeypatch:
            kill_at(monkeypatch, moment)
            with pytest.raises(Killed):
                save(run, new, keep=keep)
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


# --- damage


@pytest.mark.parametrize("name", [*FILES.values(), RECORD])
def test_a_flipped_bit_is_seen(tmp_path: Path, name: str) -> None:
    file = save(tmp_path, state(), keep=1) / name
    good = file.read_bytes()
    for position in range(0, len(good), 1 if name == RECORD else 17):
        flipped = bytearray(good)
        flipped[position] ^= 1 << position % 8
        file.write_bytes(flipped)
        with pytest.raises(UserError, match=f"^{file}: "):
            load(file.parent)
    file.write_bytes(good)
    assert_same(load(file.parent), state())


@pytest.mark.parametrize("name", [*FILES.values(), RECORD])
def test_a_truncated_file_is_seen(tmp_path: Path, name: str) -> None:
    file = save(tmp_path, state(), keep=1) / name
    good = file.read_bytes()
    for length in (0, 1, 8, len(good) // 2, len(good) - 2):
        file.write_bytes(good[:length])
        assert refusal(file.parent).startswith(f"{name}: damaged")


@pytest.mark.parametrize("name", [*FILES.values(), RECORD])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    path = save(tmp_path, state(), keep=1)
    (path / name).unlink()
    assert refusal(path) == (
        f"{name}: cannot be read (No such file or directory); use another checkpoint"
    )


def test_files_of_another_checkpoint_are_seen(tmp_path: Path) -> None:
    one, two = (save(tmp_path, state(step), keep=2) for step in (1, 2))
    shutil.copy(one / "nu.safetensors", two)
    assert refusal(two) == (
        "nu.safetensors: damaged, its checksum is not that in state.json; use another checkpoint"
    )


def test_swapped_files_are_seen(tmp_path: Path) -> None:
    path = save(tmp_path, state(), keep=1)
    (path / "mu.safetensors").rename(path / "other")
    (path / "nu.safetensors").rename(path / "mu.safetensors")
    (path / "other").rename(path / "nu.safetensors")
    assert refusal(path).startswith("mu.safetensors: damaged")


def test_one_line_for_damage(tmp_path: Path) -> None:
    path = save(tmp_path, state(), keep=1)
    with (path / "weights.safetensors").open("ab") as file:
        file.write(b"\0")
    assert refusal(path) == (
        "weights.safetensors: damaged, its checksum is not that in state.json; "
        "use another checkpoint"
    )


# --- checkpoints that are whole, but not of this Lockstep


def rewrite(path: Path, change: Callable[[dict], None]) -> None:
    """Changes state.json as another program might, with valid checksums."""
    record = json.loads((path / RECORD).read_text())
    change(record)
    for name in FILES.values():
        record["sha256"][name] = checkpoint._checksum(path / name)
    del record["sha256"][RECORD]
    record["sha256"][RECORD] = checkpoint._own_checksum(record)
    (path / RECORD).write_text(json.dumps(record))


def test_rewriting_alone_is_accepted(tmp_path: Path) -> None:
    """So that the refusals below are for the change, and not for the rewriting."""
    path = save(tmp_path, state(), keep=1)
    rewrite(path, lambda record: None)
    assert_same(load(path), state())


def test_a_newer_format_asks_for_an_upgrade(tmp_path: Path) -> None:
    path = save(tmp_path, state(), keep=1)
    line = "state.json: format 2, this version reads 1; upgrade Lockstep or use another checkpoint"
    rewrite(path, lambda record: record.update(format=2, something="new"))
    assert refusal(path) == line
    (path / RECORD).write_text('{"format": 2}')
    assert refusal(path) == line


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record.update(format=0),
        lambda record: record.update(format="1"),
        lambda record: record.update(more=1),
        lambda record: record.pop("good_steps"),
        lambda record: record["sha256"].update(more="0"),
    ],
)
def test_a_record_with_other_fields_is_refused(
    tmp_path: Path, change: Callable[[dict], None]
) -> None:
    path = save(tmp_path, state(), keep=1)
    rewrite(path, change)
    assert refusal(path) == (
        "state.json: damaged or not a Lockstep checkpoint; use another checkpoint"
    )


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"null",
        b'"format"',
        b"{}",
        b'{"format": 1}',
        json.dumps(dict.fromkeys((*COUNTERS, "dtype", "names", "sha256")) | {"format": 1}).encode(),
        b'{"format": null}',
        b"\xff\xfe",
        b"[" * 100_000,
        b"1" * 10_000,
    ],
)
def test_a_foreign_record_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / RECORD).write_bytes(text)
    assert refusal(tmp_path) == (
        "state.json: damaged or not a Lockstep checkpoint; use another checkpoint"
    )


def test_a_huge_record_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / RECORD).open("wb") as file:
        file.truncate(1 << 40)  # a terabyte of nothing
    assert refusal(tmp_path) == (
        "state.json: more than 1000000 bytes, not a Lockstep checkpoint; use another checkpoint"
    )


@pytest.mark.parametrize("field", ["mu", "nu"])
def test_moments_unlike_the_weights_are_refused(tmp_path: Path, field: str) -> None:
    path = save(tmp_path, state(), keep=1)
    name = FILES[field]
    good = load(path).mu
    fewer = {key: x for key, x in good.items() if key != "plain"}
    for other in (
        fewer,
        good | {"more": np.zeros(1, np.float32)},
        good | {"plain": np.zeros((5, 3), np.float32)},
        good | {"plain": np.zeros((3, 5), np.float64)},
    ):
        save_file(other, path / name)
        rewrite(path, lambda record: None)
        assert refusal(path) == (
            f"{name}: its tensors are not those of state.json and weights.safetensors; "
            "use another checkpoint"
        )


def test_weights_of_another_dtype_than_recorded_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path, state(), keep=1)
    rewrite(path, lambda record: record.update(dtype="float64"))
    assert refusal(path).startswith("weights.safetensors: its tensors are not those")


def test_a_file_that_is_no_safetensors_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, state(), keep=1)
    (path / "mu.safetensors").write_bytes(b"\x80\x04pickle")
    rewrite(path, lambda record: None)
    line = refusal(path)
    assert line.startswith("mu.safetensors: not a safetensors file (")
    assert line.endswith("); use another checkpoint")


# --- latest


def test_latest_passes_over_the_damaged_and_says_so(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, state(step), keep=3)
    newest, newer, good = reversed(listing(tmp_path))
    (newest / RECORD).unlink()
    os.truncate(newer / "mu.safetensors", 10)
    lines: list[str] = []
    assert_same(latest(tmp_path, lines.append), load(good))
    assert [line.split(": ")[0] for line in lines] == [
        str(newest / RECORD),
        str(newer / "mu.safetensors"),
    ]


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        latest(tmp_path, silent)
    assert str(caught.value) == (
        f"{tmp_path}: it has no checkpoint; use --overwrite to start again"
    )


def test_none_that_loads(tmp_path: Path) -> None:
    for step in (1, 2):
        (save(tmp_path, state(step), keep=2) / RECORD).unlink()
    lines: list[str] = []
    with pytest.raises(UserError) as caught:
        latest(tmp_path, lines.append)
    assert len(lines) == 2
    assert str(caught.value) == (
        f"{tmp_path}: none of its 2 checkpoints loads; use --overwrite to start again"
    )


# --- a disk that does not take it


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    save(tmp_path, state(1), keep=1)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError) as caught:
        save(tmp_path, state(2), keep=1)
    assert str(caught.value) == (
        f"{tmp_path}/checkpoints/step_00000002: cannot be written "
        "([Errno 28] No space left on device); make room there or use another --out"
    )
    assert_same(latest(tmp_path, silent), state(1))


def test_safetensors_own_error_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(tensors: Arrays, file: Path) -> None:
        save_file(tensors, file.parent / "no/such/folder")

    monkeypatch.setattr(checkpoint, "save_file", nowhere)
    with pytest.raises(UserError, match="cannot be written .*No such file"):
        save(tmp_path, state(), keep=1)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(UserError, match="step_00001000: cannot be written .*File exists"):
        save(tmp_path, state(), keep=1)
