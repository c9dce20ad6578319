"""`lockstep plan --measure`: what it races, what it says, and what it keeps."""

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from lockstep import nvidia, provenance, results
from lockstep.cli import commands
from lockstep.plan import timing
from parity_tests.tiers import tier


class Trainer:
    """In place of `subprocess.run`: a log of tokens/s, or an exit status and a last word."""

    def __init__(self, *outcomes: tuple[int, str] | int) -> None:
        self.outcomes, self.commands = list(outcomes), list[list[str]]()

    def __call__(self, words: list[str], **given: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(words)
        outcome = self.outcomes.pop(0) if self.outcomes else 100
        if isinstance(outcome, tuple):
            given["stderr"].write(outcome[1])
            return subprocess.CompletedProcess(words, outcome[0], "", "")
        out = Path(words[words.index("--out") + 1])
        out.mkdir()
        rates = (1, 1000, 1000, 1, *[outcome + change for change in (-1, 1, 0, 0, 0)])
        rows = [{"kind": "train", "tokens_per_second": r, "peak_bytes": 2**30} for r in rates]
        (out / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return subprocess.CompletedProcess(words, 0, "", "")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns where temporary files go; none must be left when all is done."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    return temporary


def race_here(
    monkeypatch: pytest.MonkeyPatch,
    trainer: Trainer,
    *words: str,
    gpu: tuple[str, str] | None = None,
) -> int:
    """Runs the command with another trainer, and a machine with this GPU or none."""
    monkeypatch.setattr(subprocess, "run", trainer)
    monkeypatch.setattr(provenance, "git_commit", str)
    monkeypatch.setattr(nvidia, "query_gpus", lambda *fields: ([[*gpu]] if gpu else [], ""))
    return commands.main(["plan", "--model", "gpt2", "--measure", *words])


H100, T4 = ("NVIDIA H100 80GB HBM3", "9.0"), ("Tesla T4", "7.5")


def read_programs(trainer: Trainer) -> list[tuple[str, str, str]]:
    """Reads the module, the policy and the remat mode of each command."""
    return [
        (
            words[2].removesuffix(".train") + " compiled" * ("--compile" in words),
            words[words.index("--policy") + 1],
            words[words.index("--remat") + 1] if "--remat" in words else "none",
        )
        for words in trainer.commands
    ]


def test_gpu_races_three_programs_without_and_with_remat(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer(100, 110, 90)
    assert race_here(monkeypatch, trainer, gpu=H100) == 0
    every = [(name, "bf16", mode) for mode in ("none", "block")
             for name in ("torch_ref compiled", "jax_impl", "torch_ref")]  # fmt: skip
    assert read_programs(trainer) == every
    assert len({words[words.index("--batch-size") + 1] for words in trainer.commands}) == 1
    assert all(words[words.index("--device") + 1] == "cuda" for words in trainer.commands)
    lines = capsys.readouterr().out.splitlines()
    assert "NVIDIA H100 80GB HBM3: 1 x 32 sequences a step, at most 10 minutes" in lines
    assert "torch, compiled, bf16, remat none: 100 tokens/s, the fastest so far" in lines
    assert "jax, bf16, remat none: 110 tokens/s, the fastest so far" in lines
    assert "torch, bf16, remat none: 90 tokens/s, 0.82 of the fastest so far" in lines
    table = lines[lines.index("") + 2 :]
    assert table[0].split() == ["jax", "bf16", "none", "110", "1.00", "0%", "1.00", "GiB"]
    assert lines[-1].startswith("run: python -m jax_impl.train --model gpt2 --policy bf16")
    assert list(folder.iterdir()) == []


def test_gpu_before_ampere_races_fp16_in_what_fits(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer()
    assert race_here(monkeypatch, trainer, gpu=T4) == 0
    assert {policy for _, policy, _ in read_programs(trainer)} == {"fp16"}
    rows = {int(words[words.index("--batch-size") + 1]) for words in trainer.commands}
    assert rows < {1, 2, 4, 8, 16}


def test_cpu_races_two_policies_and_keeps_rows(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    trainer, out = Trainer(), tmp_path / "rows.jsonl"
    words = ["--tokens", "8640000", "--price", "2", "--out", str(out)]
    assert race_here(monkeypatch, trainer, *words) == 0
    assert read_programs(trainer) == [
        (name, policy, mode)
        for policy, mode in (("bf16", "none"), ("fp32", "none"), ("bf16", "block"))
        for name in ("jax_impl", "torch_ref")
    ]
    assert "the whole run: 1.00 days, 48.00 in the unit of --price" in capsys.readouterr().out
    rows = results.read(out, "cpu")
    assert len(rows) == 6
    assert rows["plan-gpt2-t1024-eager-bf16-block-b8"]["tokens_per_second"] == 100


def test_tokens_per_step_are_accumulated(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--device", "cpu", "--micro-batch", "2", "--tokens-per-step", "2049", "--json"]
    assert race_here(monkeypatch, Trainer(), *words, gpu=H100) == 0
    found = json.loads(capsys.readouterr().out)  # the lines after each cell go to stderr
    assert found["machine"] == "cpu"
    assert (found["recommended"]["rows"], found["recommended"]["accum"]) == (2, 2)


@pytest.mark.parametrize(
    ("code", "stderr", "said"),
    [
        (1, "Traceback\ntorch.OutOfMemoryError: CUDA out of memory.\n", "CUDA out of memory"),
        (-9, "", "killed, as Linux does where no memory is left"),
        (2, "", "exit status 2"),
    ],
)  # fmt: skip
def test_failed_cell_does_not_end_the_race(
    code: int, stderr: str, said: str, folder: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert race_here(monkeypatch, Trainer((code, stderr))) == 0
    text = capsys.readouterr().out
    assert said in text and text.count("tokens/s, ") == 5
    assert race_here(monkeypatch, Trainer(*[(code, stderr)] * 6)) == 0
    assert "nothing ran" in capsys.readouterr().out
    assert list(folder.iterdir()) == []


def test_cell_that_is_ended_counts_the_steps_it_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last line of its log is half written."""
    trainer = Trainer(100)

    def end(words: list[str], **given: Any) -> Any:
        trainer(words)
        log = Path(words[words.index("--out") + 1]) / "log.jsonl"
        log.write_text(log.read_text()[:-5])
        raise subprocess.TimeoutExpired(words, given["timeout"])

    monkeypatch.setattr(subprocess, "run", end)
    found = timing.measure(["python", "-m", "torch_ref.train"], 9)
    assert found["tokens_per_second"] == 100 and found["timed_steps"] == 4
    monkeypatch.setattr(timing, "WARMUP", 7)
    found = timing.measure(["python", "-m", "torch_ref.train"], 9)
    assert found == {"failed": "9 steps took longer than its 9 s; give more --minutes"}


@pytest.mark.parametrize(("words", "said"), [
    (["--device", "cpu"], "--device cpu: a CPU's memory and time are not predicted; add --measure"),
    ([], "--device missing: name what to predict, or give --measure"),
    (["--measure", "--device", "h100"], "--device h100: --measure runs on the machine at hand"),
    (["--measure", "--memory", "4"], "--memory 4.0: predicts; with --measure, drop it"),
    (["--measure", "--policy", "bf16"], "--policy bf16: predicts; with --measure, drop it"),
    (["--measure", "--minutes", "0"], "--minutes 0.0: must be above 0"),
    (["--measure", "--out", "/"], "--out /: "),
    (["--device", "h100", "--out", "rows"], "--out rows: is of --measure; give both"),
])  # fmt: skip
def test_refusals_name_the_flag(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.main(["plan", "--model", "tiny", *words]) == 2
    assert said in capsys.readouterr().err


@tier("rest", guard="what is made of its time")
def test_a_trainer_is_really_timed(folder: Path) -> None:
    runs = sorted(path.name for path in (timing.ROOT / "runs").glob("*"))
    small = ["--model", "tiny", "--n-layer", "1", "--d-model", "32", "--context", "16"]
    words = ["python", "-m", "torch_ref.train", *small, "--batch-size", "1", "--device", "cpu"]
    found = timing.measure(words, 3600)
    assert found["tokens_per_second"] > 0 and found["peak_bytes"] > 2**20
    assert found["timed_steps"] == timing.STEPS - timing.WARMUP
    assert list(folder.iterdir()) == []
    assert sorted(path.name for path in (timing.ROOT / "runs").glob("*")) == runs
