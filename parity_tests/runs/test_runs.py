"""Whole runs: what they write, and what is sampled of them."""

import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.cli import commands, trainers
from lockstep.config import from_flags
from lockstep.data import corpus
from lockstep.process import ROOT, git_commit
from lockstep.run import checkpoint
from parity_tests.runs.fake_runs import save_at_once

STEPS = 20
SMALL = (
    "--model tiny --n-layer 2 --d-model 32 --n-head 2 --context 16 --batch-size 2 --eval-batches 2 "
    "--data text.txt --device cpu --numerics strict --dropout 0.1 --accum 2 "
    f"--steps {STEPS} --eval-every 5 --save-every 2 --out"
)
ROW = {"kind", "step", "loss", "lr", "grad_norm", "loss_scale", "skipped", "tokens",
       "tokens_per_second", "mfu", "peak_bytes", "seconds"}  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save_at_once(monkeypatch)
    (tmp_path / "text.txt").write_bytes((ROOT / "lockstep" / "config" / "sections.py").read_bytes())
    return tmp_path


def flags(out: str, extra: str = "") -> list[str]:
    return f"{SMALL} {out} {extra}".split()


def rows(run: Path, kind: str = "train") -> list[dict[str, Any]]:
    lines = (run / "log.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


def test_what_a_run_writes(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trainers.train("torch", flags("run", "--policy fp64")) == 0
    printed = capsys.readouterr().out
    run = place / "run"
    assert [row["step"] for row in rows(run)] == list(range(1, STEPS + 1))
    assert all(set(row) == ROW for row in rows(run))
    assert [row["tokens"] for row in rows(run)] == [
        step * 2 * 2 * 16 for step in range(1, STEPS + 1)
    ]
    assert all(float(np.float32(row["loss"])) != row["loss"] for row in rows(run))  # whole
    assert [row["step"] for row in rows(run, "eval")] == [0, 5, 10, 15, STEPS]
    assert [path.name for path in checkpoint.listing(run)] == ["step_00000018", "step_00000020"]
    given = vars(
        trainers.trainer_parser("torch_ref.train").parse_args(flags("run", "--policy fp64"))
    )
    assert given.pop("out") == "run"
    record = json.loads((run / "config.json").read_text())
    assert record["config"] == from_flags(given, accelerator=False).to_json()
    assert record["data_sha256"] == corpus.load("text.txt").sha256
    assert (record["framework"], record["device"], record["attention"]) == (
        "torch",
        "cpu",
        "reference",
    )
    assert record["versions"]["torch"] == torch.__version__
    assert record["python"] == platform.python_version()
    assert record["git_commit"] == git_commit()
    assert bool(record["git_commit"]) == (ROOT / ".git").exists()
    for said in ("ETA", "validation loss", "unigram entropy", "bigram", "a sample", "next:", "run"):
        assert said in printed


def test_sample_writes_the_same_text_in_both(place: Path, capsys: Any) -> None:
    assert trainers.train("torch", flags("run", "--policy fp64")) == 0
    capsys.readouterr()
    texts = []
    for options in ("--framework jax", "--framework torch", "--seed 1", "--temperature 0"):
        argv = ["sample", "run", "--prompt", "class ", "--length", "20", *options.split()]
        assert commands.main(argv) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0].startswith("class ")
    assert len({*texts}) == 3
