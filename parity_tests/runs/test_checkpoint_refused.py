"""A checkpoint that is damaged, foreign, or not of this version is refused in one line."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lockstep.errors import UserError
from lockstep.model.params import Arrays
from lockstep.run.checkpoint import load, save
from lockstep.run.record import FIELDS, FILES, FORMAT, RECORD
from parity_tests.runs.checkpoints import assert_same, refusal, rewrite, save_parts, state

DAMAGED = "damaged or not a Lockstep checkpoint"
END = "; use another checkpoint"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save(tmp_path, state(), keep=1)


@pytest.mark.parametrize("name", [*FILES.values(), RECORD])
def test_a_flipped_bit_a_cut_and_a_loss_are_seen(path: Path, name: str) -> None:
    file = path / name
    good = file.read_bytes()
    for position in range(0, len(good), 1 if name == RECORD else 17):
        flipped = bytearray(good)
        flipped[position] ^= 1 << position % 8
        file.write_bytes(flipped)
        with pytest.raises(UserError, match=f"^{file}: "):
            load(path)
    for length in (0, 1, 8, len(good) // 2, len(good) - 2):
        file.write_bytes(good[:length])
        assert refusal(path).startswith(f"{name}: damaged")
    file.write_bytes(good + b"\0")
    assert refusal(path).startswith(f"{name}: damaged")
    file.unlink()
    assert refusal(path) == f"{name}: cannot be read (No such file or directory){END}"
    file.write_bytes(good)
    assert_same(load(path), state())


def test_files_of_another_checkpoint_and_swapped_ones_are_seen(path: Path, tmp_path: Path) -> None:
    other = save(tmp_path, state(1), keep=2)
    shutil.copy(other / "nu.safetensors", path)
    line = f"nu.safetensors: damaged, its checksum is not that in state.json{END}"
    assert refusal(path) == line
    shutil.copy(path / "mu.safetensors", path / "nu.safetensors")
    assert refusal(path) == line


# --- state.json


@pytest.mark.parametrize(("number", "remedy"), [
    (FORMAT + 1, "upgrade Lockstep"), (1, "use the commit that config.json names"),
])  # fmt: skip
def test_another_format_is_refused_by_its_number(path: Path, number: int, remedy: str) -> None:
    line = f"state.json: format {number}, this version reads 2 to 3; {remedy} or use another"
    rewrite(path, lambda record: record.update(format=number, something="else"))
    assert refusal(path).startswith(line)
    (path / RECORD).write_text(json.dumps({"format": number}))
    assert refusal(path).startswith(line)


def test_other_fields_are_another_format() -> None:
    """Where this fails, raise `FORMAT`: older checkpoints are refused by its number."""
    fields = {"format", "step", "updates", "loss_scale", "good_steps", "amaxes", "dtype", "names"}
    assert FORMAT == 3
    assert fields | {"frozen", "shards", "sha256"} == FIELDS.keys()


CHANGES: list[Callable[[dict], Any]] = [
    lambda record: record.update(format=0),
    lambda record: record.update(format="2"),
    lambda record: record.update(more=1),
    lambda record: record.pop("good_steps"),
    lambda record: record["sha256"].update(more="0"),
    lambda record: record.update(format=True),
    lambda record: record.update(step=-1),
    lambda record: record.update(step=1.0),
    lambda record: record.update(updates=True),
    lambda record: record.update(good_steps=2**31),
    lambda record: record.update(loss_scale=1),
    lambda record: record.update(loss_scale=-1.0),
    lambda record: record.update(dtype="int64"),
    lambda record: record.update(names=record["names"] * 2),
    lambda record: record.update(names=[*record["names"], 1]),
    lambda record: record.update(frozen={}),
    lambda record: record.update(frozen=["no tensor"]),
    lambda record: record.update(frozen=record["names"]),
    lambda record: record.update(amaxes={"a": [[0.0]]}),
    lambda record: record.update(amaxes={"a": [[0.0], [0.0, 1.0], []]}),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_record_with_other_fields_is_refused(path: Path, change: Callable[[dict], Any]) -> None:
    rewrite(path)  # which alone is accepted
    assert_same(load(path), state())
    rewrite(path, change)
    assert refusal(path) == f"state.json: {DAMAGED}{END}"


# --- tensors whose checksums say that they are right


def test_tensors_unlike_the_record_s_are_refused(tmp_path: Path, path: Path) -> None:
    line = "its tensors are not those of state.json and weights.safetensors"
    good = load(path).mu
    fewer = {key: x for key, x in good.items() if key != "plain"}
    for name in ("mu.safetensors", "nu.safetensors"):
        kept = (path / name).read_bytes()
        for other in (
            fewer,
            good | {"more": np.zeros(1, np.float32)},
            good | {"plain": np.zeros((5, 3), np.float32)},
            good | {"plain": np.zeros((3, 5), np.float64)},
        ):
            save_file(other, path / name)
            rewrite(path)
            assert refusal(path) == f"{name}: {line}{END}"
        (path / name).write_bytes(kept)
    rewrite(path, lambda record: record.update(dtype="float64"))
    assert refusal(path).startswith(f"weights.safetensors: {line}")
    mu, nu = ({n: x for n, x in y.items() if n != "plain"} for y in (state().mu, state().nu))
    path = save(tmp_path, replace(state(), mu=mu, nu=nu), keep=1)
    rewrite(path, lambda record: record.update(frozen=[]))  # moments that are lost
    assert refusal(path).startswith(f"mu.safetensors: {line}")


# --- the pieces of several processes


def move(start: str) -> Callable[[Arrays], Arrays]:
    return lambda arrays: {
        f"plain@{start}" if key.startswith("plain") else key: x for key, x in arrays.items()
    }


GAP, KINDS = "the pieces of plain overlap or leave a gap", "have not the same axes and dtype"
WRONG: dict[str, tuple[Callable[[Arrays], Arrays], str]] = {
    "overlap": (move("0,0"), GAP),
    "gap": (move("2,0"), GAP),
    "aside": (move("1,5"), GAP),
    "far": (move("999999999999,999999999999"), GAP),
    "axes": (move("1"), KINDS),
    "dtype": (lambda arrays: {key: x.astype(np.float64) for key, x in arrays.items()}, KINDS),
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
    path = save_parts(tmp_path, state())
    file = path / "mu-0.safetensors"
    save_file(change(load_file(file)), file)
    rewrite(path)
    assert line in (said := refusal(path)) and said.endswith(END)
