"""`lockstep curves`: two programs from the command line to the verdict."""

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest

from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.files import durable
from lockstep.judge.envelope import compare_curves
from lockstep.judge.verdict import Verdict
from lockstep.parity import curves, operands
from lockstep.parity.side import Side

SMALL = {"device": "cpu", "n_layer": 1, "d_model": 16, "context": 32, "batch_size": 4}


def test_curves_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = {**SMALL, "steps": 5, "dropout": 0.1}
    assert curves.run("jax:fp64", "torch:fp64", flags, tmp_path) is Verdict.EQUAL
    printed = capsys.readouterr().out
    assert "float64, all 5 steps" in printed
    assert {path.name for path in tmp_path.iterdir()} == {"curves.json", "curves.png"}


def test_a_bug_beside_its_healthy_self(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags, bug = {**SMALL, "steps": 3}, "softmax-scale=0.5"

    def locate(reference: Side, other: Side, config: Config) -> list[str]:
        return [f"{other.name} against {reference.name}"]

    verdict = curves.run("torch:fp64", "jax:fp64", flags, tmp_path, bug, locate)
    assert verdict is Verdict.DIFFERENT
    printed = capsys.readouterr().out
    assert printed.endswith("\ntorch with softmax-scale=0.5 against jax\n")
    assert "the rung that catches it is 2 activations" in printed
    assert "different from step 1 on\nlast loss: torch:fp64 " in printed
    content = json.loads((tmp_path / "curves.json").read_text())
    healthy, sick, other = (content[side]["loss"][0] for side in ("a", "sick", "b"))
    assert np.allclose(healthy, other, rtol=0, atol=1e-12)
    assert content["compared"] == ["sick", "b"] and not np.allclose(sick, other, rtol=0, atol=1e-9)


def test_a_full_disk_loses_no_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(durable, "replace", full)
    with pytest.raises(UserError, match=f"^--out {tmp_path}: cannot be written .No space left"):
        curves.run("torch:fp64", "torch:fp64", {**SMALL, "steps": 2}, tmp_path)
    printed = capsys.readouterr().out
    assert "float64, all 2 steps" in printed and "written" not in printed


def test_where_two_curves_part_is_the_first_step_beyond_what_is_allowed() -> None:
    ours = np.linspace(3.0, 2.0, 20)
    theirs = ours + np.where(np.arange(20) < 6, 0.0, 1e-3)
    envelope = np.full(20, 1e-5)
    result = compare_curves(ours, theirs, envelope, 1.0)
    lines = curves.summarize(result, {"A": [3.0, 2.5], "B": [2.0]})
    assert lines == ["different from step 7 on", "last loss: A 2.5000, B 2.0000"]
    same = curves.summarize(compare_curves(ours, ours, envelope, 1.0), {"A": [2.0]})
    assert same == ["last loss: A 2.0000"]


def test_other_data_or_models_are_not_compared() -> None:
    a = operands.parse("jax:bf16", {})
    for flags in ({"n_layer": 2}, {"seed": 1}, {"data": "other.txt"}):
        with pytest.raises(UserError, match="not one experiment"):
            operands.require_comparable(a, operands.parse("torch:bf16", flags))
