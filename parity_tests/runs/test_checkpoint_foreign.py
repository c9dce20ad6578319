"""A checkpoint that is whole, but not of this Lockstep, is refused in one line."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from lockstep.run.checkpoint import load, save
from lockstep.run.record import COUNTERS, FIELDS, FILES, FORMAT, RECORD
from parity_tests.runs.checkpoints import assert_same, refusal, rewrite, state


def test_rewriting_alone_is_accepted(tmp_path: Path) -> None:
    """So that the refusals below are for the change, and not for the rewriting."""
    path = save(tmp_path, state(), keep=1)
    rewrite(path, lambda record: None)
    assert_same(load(path), state())


def test_lost_moments_are_not_those_of_a_frozen_weight(tmp_path: Path) -> None:
    whole = state()
    mu, nu = ({n: x for n, x in y.items() if n != "plain"} for y in (whole.mu, whole.nu))
    path = save(tmp_path, replace(whole, mu=mu, nu=nu), keep=1)
    rewrite(path, lambda record: record.update(frozen=[]))
    assert refusal(path).startswith("mu.safetensors: its tensors are not those of state.json")


@pytest.mark.parametrize(
    ("number", "remedy"), [(3, "upgrade Lockstep"), (1, "use the commit that config.json names")]
)
def test_another_format_is_refused_by_its_number(tmp_path: Path, number: int, remedy: str) -> None:
    path = save(tmp_path, state(), keep=1)
    line = f"state.json: format {number}, this version reads 2; {remedy} or use another checkpoint"
    rewrite(path, lambda record: record.update(format=number, something="else"))
    assert refusal(path) == line
    (path / RECORD).write_text(json.dumps({"format": number}))
    assert refusal(path) == line


def test_other_fields_are_another_format() -> None:
    """Where this fails, raise `FORMAT`: older checkpoints are refused by its number."""
    fields = {"format", "step", "updates", "loss_scale", "good_steps", "amaxes", "dtype", "names"}
    assert FORMAT == 2
    assert fields | {"frozen", "shards", "sha256"} == FIELDS


@pytest.mark.parametrize(
    "change",
    [
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
        b'{"format": 2}',
        json.dumps(dict.fromkeys((*COUNTERS, "dtype", "names", "sha256")) | {"format": 2}).encode(),
        b'{"format": null}',
        b"\xff\xfe",
        b"[" * 100_000,
        b"1" * 10_000,
    ],
)
def test_a_foreign_record_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / RECORD).write_bytes(text)
    line = refusal(tmp_path)
    assert line.startswith("state.json: damaged or not a Lockstep checkpoint")
    assert line.endswith("; use another checkpoint")


def test_a_huge_record_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / RECORD).open("wb") as file:
        file.truncate(1 << 40)  # a terabyte of nothing
    assert refusal(tmp_path) == (
        "state.json: damaged or not a Lockstep checkpoint (too large, over 2000000 bytes); "
        "use another checkpoint"
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
    assert line.startswith("mu.safetensors: damaged or not a Lockstep checkpoint (no safetensors")
    assert line.endswith("); use another checkpoint")
