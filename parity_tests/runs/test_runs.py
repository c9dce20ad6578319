"""Whole runs: what they write, how they end, and that a stopped one goes on as if it never had."""

import json
import os
import platform
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep import twin
from lockstep.cli import commands, trainers
from lockstep.config import from_flags
from lockstep.data import corpus
from lockstep.model.state import TrainState
from lockstep.process import ROOT, git_commit
from lockstep.run import checkpoint, runlog
from parity_tests.runs.fake_runs import save_at_once
from parity_tests.tiers import tier

STEPS = 20
SMALL = (
    "--model tiny --n-layer 2 --d-model 32 --n-head 2 --context 16 --batch-size 2 --eval-batches 2 "
    "--data text.txt --device cpu --numerics strict --dropout 0.1 --accum 2 "
    f"--steps {STEPS} --eval-every 5 --save-every 2 --out"
)
ROW = {"kind", "step", "loss", "lr", "grad_norm", "loss_scale", "skipped", "tokens",
       "tokens_per_second", "mfu", "peak_bytes", "seconds"}  # fmt: skip

# What stops a run, again and again, in each framework.
STOPS = {
    "jax": [signal.SIGTERM, signal.SIGKILL, signal.SIGINT],
    "torch": [signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGINT],
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save_at_once(monkeypatch)
    (tmp_path / "text.txt").write_bytes((ROOT / "lockstep" / "config" / "sections.py").read_bytes())
    return tmp_path


def flags(out: str, extra: str = "") -> list[str]:
    return f"{SMALL} {out} {extra}".split()


def process(
    framework: str, argv: list[str], pause: float = 0, barrier: int = STEPS
) -> subprocess.Popen:
    """`python -m ...` with a pause after each row of the log, so that a signal can arrive.

    Before step `barrier` is over it waits for a file "go": no load lets it end before the signal.
    """
    code = (
        "import os, runpy, time; from lockstep.run.runlog import RunLog; write = RunLog.write\n"
        "def slow(self, row):\n"
        f"    write(self, row); time.sleep({pause})\n"
        f"    while {barrier} <= row['step'] < {STEPS} and not os.path.exists('go'):\n"
        "        time.sleep(0.01)\n"
        "RunLog.write = slow\n"
        f"runpy.run_module({twin.trainer_module(framework)!r}, run_name='__main__', alter_sys=True)"
    )
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(Path("cache").absolute()),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return subprocess.Popen(
        [sys.executable, "-c", code, *argv], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=os.environ | cache | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def rows(run: Path, kind: str = "train") -> list[dict[str, Any]]:
    lines = (run / "log.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


def final(run: Path) -> TrainState:
    return checkpoint.load(checkpoint.listing(run)[-1])


def assert_same_run(run: Path, other: Path) -> None:
    """Bitwise: each step once, the same losses, the same weights and moments in the end."""
    assert [row["step"] for row in rows(run)] == list(range(1, STEPS + 1))
    measured = {"tokens_per_second", "mfu", "peak_bytes", "seconds"}
    for kind in ("train", "eval"):
        assert [{k: row[k] for k in row.keys() - measured} for row in rows(run, kind)] == [
            {k: row[k] for k in row.keys() - measured} for row in rows(other, kind)
        ]
    a, b = final(run), final(other)
    assert (a.step, a.updates) == (b.step, b.updates) == (STEPS, STEPS)
    for field in ("params", "mu", "nu"):
        mine, theirs = getattr(a, field), getattr(b, field)
        assert all(mine[name].tobytes() == theirs[name].tobytes() for name in mine), field


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


def last_step(log: Path) -> int:
    return max((row["step"] for row in runlog.rows(log)), default=0)


@tier("rest", guard="rung 10")
@pytest.mark.parametrize("framework", STOPS)
def test_a_run_stopped_again_and_again_is_bitwise_one_that_never_was(
    framework: str, place: Path
) -> None:
    """Ctrl-C and SIGTERM save and exit with 130; after SIGKILL the last checkpoint is there."""
    whole = process(framework, flags("whole"))
    out, err = whole.communicate()
    assert (whole.returncode, err) == (0, "")
    assert "\x1b" not in out
    assert "\r" not in out
    dice, argv = random.Random(framework), flags("run")
    for number in STOPS[framework]:
        (place / "go").unlink(missing_ok=True)
        log = place / "run" / "log.jsonl"
        before = last_step(log)
        target = before + dice.randint(2, 3) if before else 4  # step 2 is saved by then
        run = process(framework, argv, pause=0.1, barrier=min(target + 2, STEPS - 1))
        while last_step(log) < target:
            assert run.poll() is None, run.communicate()
            time.sleep(0.02)
        time.sleep(dice.random() / 10)
        run.send_signal(number)
        (place / "go").touch()
        out, err = run.communicate()
        assert err == ""
        if number == signal.SIGKILL:
            assert run.returncode == -signal.SIGKILL
        else:
            assert run.returncode == 130
            step = final(place / "run").step
            assert f"stopped after step {step}, which is saved; go on with --resume" in out
            assert rows(place / "run")[-1]["step"] == step < STEPS
        argv = ["--resume", "--out", "run"]
    resumed = process(framework, argv)
    _, err = resumed.communicate()
    assert (resumed.returncode, err) == (0, "")
    assert_same_run(place / "run", place / "whole")


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
