"""Files that are flipped, cut, lost or swapped are named, and never loaded."""

import shutil
from pathlib import Path

import pytest

from lockstep.errors import UserError
from lockstep.run.checkpoint import load, save
from lockstep.run.record import FILES, RECORD
from parity_tests.runs.checkpoints import assert_same, refusal, state


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
        "weights.safetensors: damaged or not a Lockstep checkpoint (no safetensors file: 1 bytes "
        "behind its tensors); use another checkpoint"
    )
