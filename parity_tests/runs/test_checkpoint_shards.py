"""A checkpoint whose parts are written by several processes is that of one."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lockstep.errors import UserError
from lockstep.model.params import Arrays
from lockstep.run import checkpoint
from lockstep.run.checkpoint import load, open_state
from lockstep.run.record import RECORD
from lockstep.run.saver import Saver
from parity_tests.runs.checkpoints import (
    DTYPES,
    assert_same,
    hidden,
    part_of,
    refusal,
    rewrite,
    save_parts,
    silent,
    state,
)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_are_read_as_one(tmp_path: Path, dtype: str) -> None:
    path = save_parts(tmp_path, state(dtype=dtype))
    assert_same(load(path), state(dtype=dtype))
    stems = (f"{stem}-{rank}.safetensors" for stem in ("weights", "mu", "nu") for rank in range(3))
    assert {file.name for file in path.iterdir()} == {RECORD, *stems}
    assert hidden(tmp_path) == []


def test_nothing_has_its_name_before_all_parts_are_there(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(checkpoint.save, tmp_path, part_of(state(), 0), keep=1)
        checkpoint.save(tmp_path, part_of(state(), 2), keep=1)
        assert not first.done() and checkpoint.listing(tmp_path) == []
        checkpoint.save(tmp_path, part_of(state(), 1), keep=1)
        assert [first.result()] == checkpoint.listing(tmp_path)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_part_that_cannot_be_written_ends_the_save(tmp_path: Path, rank: int) -> None:
    """Here for weights that are not finite, which nobody should resume from."""
    whole = {name: np.nan_to_num(np.asarray(x)) * 0 for name, x in state().params.items()}
    bad = {**whole, "plain": np.where(np.arange(3)[:, None] == 1 - rank, np.nan, whole["plain"])}
    bad["plain"] = bad["plain"].astype(np.float32)

    def save(rank: int) -> str:
        saver = Saver(tmp_path, 1, silent_log(), silent, shared=True)  # type: ignore[arg-type]
        try:
            saver.finish(part_of(replace(state(), params=bad), rank), {})
        except UserError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(3) as pool:
        said = list(pool.map(save, range(3)))
    assert "weights are not finite" in said[0]
    assert ("rank 1" in said[0]) == (rank == 1)
    assert checkpoint.listing(tmp_path) == []


class silent_log:
    def sync(self) -> None:
        pass


def spoil(path: Path, name: str, change: Callable[[Arrays], Arrays]) -> str:
    """What is said of a checkpoint with another file, its checksums made good."""
    save_file(change(load_file(path / name)), path / name)
    rewrite(path)
    return refusal(path)


def moved(start: str) -> Callable[[Arrays], Arrays]:
    return lambda arrays: {
        f"plain@{start}" if key.startswith("plain") else key: x for key, x in arrays.items()
    }


WRONG: dict[str, tuple[Callable[[Arrays], Arrays], str]] = {
    "overlap": (moved("0,0"), "the pieces of plain overlap or leave a gap"),
    "gap": (moved("2,0"), "the pieces of plain overlap or leave a gap"),
    "aside": (moved("1,5"), "the pieces of plain overlap or leave a gap"),
    "far": (moved("999999999999,999999999999"), "the pieces of plain overlap or leave a gap"),
    "axes": (moved("1"), "the pieces of plain have not the same axes and dtype"),
    "dtype": (
        lambda arrays: {key: x.astype(np.float64) for key, x in arrays.items()},
        "have not the same axes and dtype",
    ),
    "lost": (
        lambda arrays: {key: x for key, x in arrays.items() if not key.startswith("plain")},
        "mu-0.safetensors: its tensors are not those of state.json and weights-0.safetensors",
    ),
    "shape": (
        lambda arrays: {key: x[..., :1].copy() if x.ndim > 1 else x for key, x in arrays.items()},
        "overlap or leave a gap",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_part_is_refused(tmp_path: Path, wrong: str) -> None:
    change, line = WRONG[wrong]
    said = spoil(save_parts(tmp_path, state()), "mu-0.safetensors", change)
    assert line in said and said.endswith("; use another checkpoint")


def test_a_lost_or_foreign_part_is_named(tmp_path: Path) -> None:
    path = save_parts(tmp_path, state())
    (path / "nu-1.safetensors").write_bytes((path / "nu-2.safetensors").read_bytes())
    assert refusal(path).startswith("nu-1.safetensors: damaged, its checksum is not that")
    (path / "nu-1.safetensors").unlink()
    assert refusal(path).startswith("nu-1.safetensors: cannot be read (No such file")


def test_two_that_wait_leave_no_room_for_a_third(tmp_path: Path) -> None:
    """Processes that share checkpoints ask each other; one alone never leaves the newest out."""
    release = threading.Event()
    for shared in (True, False):
        release.clear()
        lines: list[str] = []
        saver = Saver(tmp_path, 1, silent_log(), lines.append, shared=shared)  # type: ignore[arg-type]
        run = replace(state(1), params={})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint, "save", lambda *args, **rest: release.wait(30))
            assert not saver.crowded
            saver.save(run, {})
            saver.save(replace(run, step=2), {})
            assert saver.crowded == shared
            saver.skip(3)
            release.set()
            saver.writer.shutdown()
        assert lines == ["step 3 is not saved: an earlier checkpoint is still being written"]


def test_a_part_is_read_without_the_others(tmp_path: Path) -> None:
    """What is not needed may be unreadable."""
    path = save_parts(tmp_path, state())
    for file in path.glob("*-0.safetensors"):  # rows from 1 on
        content = file.read_bytes()
        header = 8 + int.from_bytes(content[:8], "little")
        file.write_bytes(content[:header] + bytes(len(content) - header))
    found = open_state(path)
    for name, array in state().mu.items():
        assert (found.mu[name].shape, found.mu[name].dtype) == (array.shape, array.dtype)
        place = slice(1) if array.ndim else ...
        assert found.mu[name][place].tobytes() == array[place].tobytes()
    for name in ("plain", "transposed"):
        with pytest.raises(UserError, match="mu-0.safetensors: damaged, its checksum"):
            found.mu[name][1:, 2:]


def test_any_place_is_that_of_the_array(tmp_path: Path) -> None:
    found, whole = open_state(save_parts(tmp_path, state())).nu, state().nu
    for place in (..., slice(1, 2), (slice(2), slice(1, 3)), (slice(None), slice(2, 9))):
        for name in ("plain", "transposed", "permuted"):
            assert found[name][place].tobytes() == whole[name][place].tobytes()
