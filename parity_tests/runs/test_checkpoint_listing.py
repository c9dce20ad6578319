"""Which checkpoints a run has, which of them are kept, and which one it goes on from."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.errors import UserError
from lockstep.run.checkpoint import latest, listing, load, save
from lockstep.run.record import RECORD
from parity_tests.runs.checkpoints import arrays, assert_same, hidden, silent, state


def names(run: Path) -> list[str]:
    return [path.name for path in listing(run)]


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
