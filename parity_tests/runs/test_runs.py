"""Runs by the trainers themselves: what they write, and that they pass between the frameworks."""

import json
import os
import platform
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep import exits
from lockstep.cli import commands, trainers
from lockstep.config import from_flags
from lockstep.data import corpus
from lockstep.judge.compare import changed_tensors
from lockstep.judge.tolerances import ENVELOPE_CAP
from lockstep.process import ROOT, git_commit
from lockstep.run import checkpoint, directory, runlog
from lockstep.train import loss_scale, trainer
from lockstep.train.loop import Loop
from lockstep.twin import StepResult
from parity_tests.pair import start
from parity_tests.runs.fake_runs import save_at_once
from parity_tests.tiers import tier

FRAMEWORKS = ("jax", "torch")
TEXT = Path(trainer.__file__)
SMALL = (
    "--model tiny --n-layer 1 --d-model 32 --n-head 2 --context 16 --batch-size 2 --eval-batches 2 "
    "--data text.txt --device cpu --numerics strict --accum 2 --eval-every 5 --save-every 0 --out"
)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save_at_once(monkeypatch)
    (tmp_path / "text.txt").write_bytes(TEXT.read_bytes())
    return tmp_path


def train_until(step: int, framework: str, argv: list[str]) -> int:
    """Stops, and saves, when this step has been reported: at most two steps later."""
    report = Loop.report

    def stop(self: Loop, result: StepResult) -> None:
        report(self, result)
        if self.done == step:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "report", stop)
        return trainers.train(framework, argv)


def begin(out: str, flags: str) -> list[str]:
    return f"{SMALL} {out} {flags}".split()


RESUME = ["--resume", "--out", "run"]


def rows(run: str, kind: str) -> list[dict[str, Any]]:
    return [row for row in runlog.rows(Path(run, "log.jsonl")) if row["kind"] == kind]


def gap(kind: str, field: str) -> float:
    mine, theirs = rows("run", kind), rows("whole", kind)
    assert [row["step"] for row in mine] == [row["step"] for row in theirs]
    return max(abs(a[field] - b[field]) for a, b in zip(mine, theirs))


@tier("rest", guard="rung 10")
def test_four_hand_overs_leave_no_trace() -> None:
    """In float64: the bounds of rung 8."""
    flags = "--policy fp64 --dropout 0.1 --steps 14"
    assert trainers.train("torch", begin("whole", flags)) == exits.DONE
    argv = begin("run", flags)
    for hand_over in range(4):
        framework = FRAMEWORKS[hand_over % 2]
        assert train_until(3 * hand_over + 1, framework, argv) == exits.STOPPED
        assert directory.read_record(Path("run")).framework == framework
        argv = RESUME
    assert trainers.train(FRAMEWORKS[0], argv) == exits.DONE
    assert gap("train", "loss") <= 1e-12
    assert gap("train", "grad_norm") <= 1e-10
    assert gap("eval", "val_loss") <= 1e-12


@tier("rest", guard="rung 10")
def test_a_run_goes_on_under_another_policy() -> None:
    """In either framework: weights and moments as they were, a loss scale where one is needed."""
    assert trainers.train("torch", begin("run", "--policy bf16 --steps 6")) == exits.DONE
    before = checkpoint.latest(Path("run"), pytest.fail)
    shutil.copytree("run", "other")
    config = directory.read_record(Path("run")).config.replace(policy="fp16", steps=9)
    begun = loss_scale.carry(before, config, runlog.rows(Path("run", "log.jsonl")))
    assert (begun.loss_scale, begun.good_steps, begun.updates) == (2.0**16, 0, before.updates)
    for framework in FRAMEWORKS:
        twin = start(framework, config, begun)
        assert changed_tensors(begun, twin.state()) == []
    found = {}
    for framework, run in zip(FRAMEWORKS, ("run", "other")):
        words = ["--resume", "--out", run, "--policy", "fp16", "--steps", "9"]
        assert trainers.train(framework, words) == exits.DONE
        found[framework] = [row for row in rows(run, "train") if row["step"] > 6]
        assert directory.read_record(Path(run)).config.precision.policy == "fp16"
    for ours, theirs in zip(*found.values(), strict=True):
        assert ours["loss_scale"] == theirs["loss_scale"] and ours["skipped"] == theirs["skipped"]
        assert abs(ours["loss"] - theirs["loss"]) < ENVELOPE_CAP["rounded"]
    assert found["jax"][0]["loss_scale"] == 2.0**16
    assert trainers.train("jax", [*RESUME, "--policy", "bf16", "--steps", "10"]) == exits.DONE
    end = checkpoint.latest(Path("run"), pytest.fail)
    assert (end.loss_scale, end.good_steps, rows("run", "train")[-1]["loss_scale"]) == (1.0, 0, 1.0)


# --- what a run writes, and what is sampled of it

WRITTEN = "--policy fp64 --dropout 0.1 --steps 20 --save-every 2"
ROW = {"kind", "step", "loss", "lr", "grad_norm", "loss_scale", "skipped", "tokens",
       "tokens_per_second", "mfu", "peak_bytes", "seconds"}  # fmt: skip


def test_what_a_run_writes(capsys: pytest.CaptureFixture[str]) -> None:
    words, run = begin("run", WRITTEN), Path("run")
    assert trainers.train("torch", words) == exits.DONE
    printed, found = capsys.readouterr().out, rows("run", "train")
    assert [row["step"] for row in found] == list(range(1, 21))
    assert all(set(row) == ROW for row in found)
    assert [row["tokens"] for row in found] == [step * 2 * 2 * 16 for step in range(1, 21)]
    assert all(float(np.float32(row["loss"])) != row["loss"] for row in found)  # whole
    assert [row["step"] for row in rows("run", "eval")] == [0, 5, 10, 15, 20]
    assert [path.name for path in checkpoint.listing(run)] == ["step_00000018", "step_00000020"]
    given = vars(trainers.trainer_parser("torch_ref.train").parse_args(words))
    assert given.pop("out") == "run"
    record = json.loads(Path("run/config.json").read_text())
    assert record["config"] == from_flags(given, accelerator=False).to_json()
    assert record["data_tokens"] == list(corpus.load("text.txt").sizes)
    told = (record["framework"], record["device"], record["attention"])
    assert told == ("torch", "cpu", "reference")
    assert record["versions"]["torch"] == torch.__version__
    assert record["python"] == platform.python_version()
    assert record["git_commit"] == git_commit()
    assert bool(record["git_commit"]) == (ROOT / ".git").exists()
    for said in ("ETA", "validation loss", "a sample", "next:", "run"):
        assert said in printed


def test_sample_writes_the_same_text_in_both(capsys: pytest.CaptureFixture[str]) -> None:
    assert trainers.train("torch", begin("run", WRITTEN)) == 0
    capsys.readouterr()
    texts = []
    for options in ("--framework jax", "--framework torch", "--seed 1", "--temperature 0"):
        argv = ["sample", "run", "--prompt", "class ", "--length", "20", *options.split()]
        assert commands.main(argv) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0].startswith("class ")
    assert len({*texts}) == 3
