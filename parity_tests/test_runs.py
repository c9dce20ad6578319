"""Whole runs: what they write, how they end, and that a stopped one goes on as if it never had."""

import json
import os
import pty
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep import checkpoint, cli, rundir, sampling
from lockstep.params import Arrays
from lockstep.twin import TrainState

ROOT = Path(__file__).parent.parent
MODULES = {"jax": "jax_impl.train", "torch": "torch_ref.train"}
STEPS = 12
SMALL = (
    "--n-layer 2 --d-model 32 --n-head 2 --context 16 --batch-size 2 --eval-batches 2 --device cpu "
    "--data text.txt --numerics strict --dropout 0.1 --accum 2 --eval-every 5 --save-every 4"
)
ROW = {"kind", "step", "loss", "lr", "grad_norm", "loss_scale", "skipped", "tokens",
       "tokens_per_second", "mfu", "peak_bytes", "seconds"}  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_bytes((ROOT / "lockstep" / "config.py").read_bytes())
    return tmp_path


def flags(out: str, extra: str = "") -> list[str]:
    return f"{SMALL} --steps {STEPS} --out {out} {extra}".split()


def process(framework: str, argv: list[str], place: Path, **options: Any) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", MODULES[framework], *argv]
    return subprocess.Popen(command, cwd=place, env=environment, text=True, **options)


def rows(run: Path, kind: str = "train") -> list[dict[str, Any]]:
    lines = (run / "log.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


def final(run: Path) -> TrainState:
    return checkpoint.load(checkpoint.listing(run)[-1])


def assert_same_run(run: Path, other: Path) -> None:
    """Bitwise: each step once, the same losses, the same weights and moments in the end."""
    ours, theirs = rows(run), rows(other)
    assert [row["step"] for row in ours] == list(range(1, STEPS + 1))
    for field in ("loss", "grad_norm", "lr", "loss_scale", "skipped"):
        assert [row[field] for row in ours] == [row[field] for row in theirs], field
    assert [(r["step"], r["val_loss"]) for r in rows(run, "eval")] == [
        (r["step"], r["val_loss"]) for r in rows(other, "eval")
    ]
    a, b = final(run), final(other)
    assert (a.step, a.updates) == (b.step, b.updates) == (STEPS, STEPS)
    for field in ("params", "mu", "nu"):
        ours_, theirs_ = getattr(a, field), getattr(b, field)
        assert all(ours_[name].tobytes() == theirs_[name].tobytes() for name in ours_), field


def test_what_a_run_writes(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.train("torch", flags("run", "--policy bf16")) == 0
    printed = capsys.readouterr().out
    run = place / "run"
    log = rows(run)
    assert [row["step"] for row in log] == list(range(1, STEPS + 1))
    assert all(set(row) == ROW for row in log)
    assert all(repr(row["loss"]) in (run / "log.jsonl").read_text() for row in log)
    assert [row["step"] for row in rows(run, "eval")] == [0, 5, 10, STEPS]
    config = json.loads((run / "config.json").read_text())
    assert config["framework"] == "torch"
    assert config["config"]["optim"]["steps"] == STEPS
    assert {"data_sha256", "versions", "device", "git_commit", "attention"} <= config.keys()
    assert [path.name for path in checkpoint.listing(run)] == ["step_00000008", "step_00000012"]
    assert "\x1b" not in printed
    assert "\r" not in printed
    for said in ("ETA", "validation loss", "unigram entropy", "bigram", "a sample", "next:", "run"):
        assert said in printed


def test_default_directories_never_collide(place: Path) -> None:
    argv = f"{SMALL} --steps 1 --policy fp32".split()
    for _ in range(3):
        assert cli.train("torch", argv) == 0
    names = sorted(path.name for path in (place / "runs").iterdir())
    assert names == ["torch-tiny-fp32", "torch-tiny-fp32-2", "torch-tiny-fp32-3"]


def test_a_terminal_gets_a_progress_bar(place: Path) -> None:
    controller, terminal = pty.openpty()
    run = process("torch", flags("run"), place, stdout=terminal, stderr=terminal,
                  stdin=subprocess.DEVNULL)  # fmt: skip
    os.close(terminal)
    shown = b""
    while True:
        try:
            piece = os.read(controller, 65536)
        except OSError:  # the terminal's other end is closed
            break
        if not piece:
            break
        shown += piece
    os.close(controller)
    assert run.wait() == 0
    assert b"\x1b[" in shown
    assert b"ETA" in shown
    assert len(rows(place / "run")) == STEPS


def test_a_loss_that_is_not_finite_ends_with_status_3(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rate explodes at step 7, so the loss does at 8; the checkpoint of step 6 is the last."""
    rates = np.array([1e-3] * 6 + [1e30] * 6)
    monkeypatch.setattr("torch_ref.step.learning_rates", lambda optim: rates)
    assert cli.train("torch", flags("run", "--policy fp32 --save-every 1 --keep 9")) == 3
    line = capsys.readouterr().err
    assert "step 8" in line
    assert "step_00000006" in line
    assert "--lr" in line
    assert rows(place / "run")[-1]["step"] == 8
    assert rows(place / "run")[-1]["loss"] is None
    good = checkpoint.load(place / "run" / "checkpoints" / "step_00000006")
    assert all(np.isfinite(weight).all() for weight in good.params.values())


@pytest.mark.parametrize("framework", MODULES)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_run_goes_on_bitwise(framework: str, number: int, place: Path) -> None:
    """Ctrl-C and SIGTERM save and exit with 130; after SIGKILL the last checkpoint is there."""
    whole = process(framework, flags("whole"), place, stdout=subprocess.DEVNULL)
    assert whole.wait() == 0
    stop_after = random.Random(f"{framework} {number}").randint(5, 8)
    # Slowed down at each row of the log, so that the signal arrives in the middle.
    slow = (
        "import sys, time, runpy; from lockstep.runlog import RunLog; write = RunLog.write\n"
        "def slowly(self, row): write(self, row); time.sleep(0.15)\n"
        f"RunLog.write = slowly; sys.argv[0] = ''; runpy.run_module({MODULES[framework]!r}, "
        "run_name='__main__')"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", slow, *flags("run")], cwd=place, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not (log := place / "run" / "log.jsonl").exists() or len(rows(log.parent)) < stop_after:
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    run.send_signal(number)
    out, err = run.communicate()
    if number == signal.SIGKILL:
        assert run.returncode == -signal.SIGKILL
    else:
        assert run.returncode == 130, (out, err)
        assert "--resume" in out
        assert err == ""
        assert final(place / "run").step < STEPS
    resumed = process(framework, ["--resume", "--out", "run"], place, stdout=subprocess.DEVNULL)
    assert resumed.wait() == 0
    assert_same_run(place / "run", place / "whole")


def test_resume_in_the_other_framework(place: Path) -> None:
    """The curve of a run that changed hands is that of one that did not."""
    constant = "--policy fp64 --lr 1e-3 --min-lr 1e-3 --warmup 0"  # whatever --steps says
    assert cli.train("torch", flags("whole", constant)) == 0
    assert cli.train("torch", flags("run", f"{constant} --steps 6")) == 0
    argv = ["--resume", "--out", "run", "--steps", str(STEPS)]
    assert process("jax", argv, place, stdout=subprocess.DEVNULL).wait() == 0
    assert rundir.read_record(place / "run").framework == "jax"
    ours, theirs = rows(place / "run"), rows(place / "whole")
    assert len(ours) == STEPS
    assert max(abs(a["loss"] - b["loss"]) for a, b in zip(ours, theirs)) <= 1e-12
    assert any(a["loss"] != b["loss"] for a, b in zip(ours, theirs))  # it was another program


def test_overwrite_replaces_the_run_and_nothing_else(place: Path) -> None:
    assert cli.train("torch", flags("run", "--steps 3 --warmup 0")) == 0
    (place / "run" / "notes.txt").write_text("mine")
    assert cli.train("torch", flags("run", "--steps 2 --warmup 0 --overwrite")) == 0
    assert len(rows(place / "run")) == 2
    assert (place / "run" / "notes.txt").read_text() == "mine"
    assert [path.name for path in checkpoint.listing(place / "run")] == ["step_00000002"]


def test_sample_writes_the_same_text_in_both(place: Path, capsys: Any) -> None:
    assert cli.train("torch", flags("run", "--policy fp64")) == 0
    capsys.readouterr()
    texts = []
    for options in ("--framework jax", "--framework torch", "--seed 1", "--temperature 0"):
        argv = ["sample", "run", "--prompt", "class ", "--length", "20", *options.split()]
        assert cli.main(argv) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0].startswith("class ")
    assert len({*texts}) == 3


class Scores:
    """Stands where a twin stands: the same scores for each token."""

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        return np.array([0.0, 1.0, 2.0, 3.0])


def test_choice() -> None:
    def drawn(**options: Any) -> bytes:
        return sampling.sample(Scores(), b"\0", length=400, context=8, **options)  # type: ignore[arg-type]

    assert set(drawn(temperature=0)) == {3}
    assert set(drawn(temperature=1.0, top_k=2)) == {2, 3}
    assert set(drawn(temperature=1.0, top_k=0)) == {0, 1, 2, 3}
    assert drawn(seed=1) == drawn(seed=1) != drawn(seed=2)
    weights: Arrays = {"softmax": np.exp(Scores().logits(np.zeros(1)))}
    share = np.bincount(list(drawn(temperature=1.0, top_k=0)), minlength=4) / 400
    expected = weights["softmax"] / weights["softmax"].sum()
    # 400 draws: a share of p is off by sqrt(p (1 - p) / 400) = 0.025 at most; four of those.
    assert np.abs(share - expected).max() < 0.1
