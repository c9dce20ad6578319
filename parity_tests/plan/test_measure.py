"""`lockstep plan --measure`: what a CPU user is told to use, and what it times."""

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli import commands
from lockstep.plan import here, timing
from parity_tests.tiers import tier


class Trainer:
    """In place of `subprocess.run`: a log of tokens/s, or an exit status and a last word."""

    def __init__(self, *outcomes: tuple[int, str]) -> None:
        self.outcomes, self.commands = list(outcomes), list[list[str]]()

    def __call__(self, words: list[str], **given: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(words)
        code, said = self.outcomes.pop(0) if self.outcomes else (0, "")
        if not code:
            out = Path(words[words.index("--out") + 1])
            out.mkdir()
            rates = (1, 1000, 90, 110, 100, 100)  # the first ones compile
            rows = [{"kind": "train", "tokens_per_second": r, "peak_bytes": 2**30} for r in rates]
            (out / "log.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return subprocess.CompletedProcess(words, code, "", said)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns where temporary files go; none must be left when all is done."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


TORCH = ["plan", "--model", "tiny", "--framework", "torch"]
MEASURED = [*TORCH, "--device", "h100", "--measure"]
ON_CPU = [*TORCH, "--device", "cpu"]


def test_three_candidates_are_timed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer()
    monkeypatch.setattr(subprocess, "run", trainer)
    assert commands.main(MEASURED) == 0
    text = capsys.readouterr().out
    assert text.count("measured here: torch, ") == len(trainer.commands) == 6  # eager and compiled
    assert "100 tokens/s (" in text and "predicted), peak 1.00 GiB" in text
    recommended = text.partition("recommended: ")[2].partition("\n")[0].split()
    assert trainer.commands[0][1 : len(recommended)] == recommended[1:]
    kinds = {row.partition(" x ")[0] for row in text.splitlines() if "measured here" in row}
    assert len(kinds) == 6  # of program, policy and remat
    assert len({tuple(words[:-1]) for words in trainer.commands}) == 6  # the last is its folder
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "stderr", "said"),
    [
        (1, "Traceback\ntorch.OutOfMemoryError: CUDA out of memory.\n", "CUDA out of memory"),
        (-9, "", "killed, as Linux does where no memory is left"),
        (2, "", "exit status 2"),
    ],
)  # fmt: skip
def test_a_candidate_that_fails_is_said_and_the_others_are_timed(
    code: int, stderr: str, said: str, folder: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(subprocess, "run", Trainer((code, stderr)))
    assert commands.main(MEASURED) == 0
    lines = [row for row in capsys.readouterr().out.splitlines() if "measured here" in row]
    assert said in lines[0] and "tokens/s" not in lines[0]
    assert all("100 tokens/s" in row for row in lines[1:]) and len(lines) == 6
    assert list(folder.iterdir()) == []


def test_on_a_cpu_all_is_timed_and_nothing_predicted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fastest is recommended; the first is killed here."""
    trainer = Trainer((-9, ""))
    monkeypatch.setattr(subprocess, "run", trainer)
    words = ["--measure", "--micro-batch", "4", "--tokens", "8640000", "--price", "2"]
    assert commands.main([*ON_CPU, *words]) == 0
    text = capsys.readouterr().out
    assert text.count("measured here: torch, ") == len(trainer.commands) == len(here.CANDIDATES)
    assert "killed" in text and "100 tokens/s, peak 1.00 GiB" in text and "predicted)" not in text
    assert (
        "recommended: python -m torch_ref.train --model tiny --policy bf16 --batch-size 4" in text
    )
    assert "the whole run: 1.00 days, 48.00 in the unit of --price" in text
    assert commands.main([*ON_CPU, "--measure", "--tokens-per-step", "999", "--json"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)["plans"]
    assert plan["recommended"]["rows"] == here.ROWS
    assert plan["recommended"]["accum"] == -(-999 // (here.ROWS * 256))


@pytest.mark.parametrize(("words", "said"), [
    ([], "--device cpu: a CPU's memory and time are not predicted; add --measure, which times"),
    (["--measure", "--memory", "4"], "--memory 4.0: is not for --device cpu; drop it"),
    (["--measure", "--devices", "2"], "--devices 2: is not for --device cpu; drop it"),
])  # fmt: skip
def test_what_nobody_predicts_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.main([*ON_CPU, *words]) == 2
    assert said in capsys.readouterr().err


@tier("rest", guard="what is made of its time")
def test_a_trainer_is_really_timed(folder: Path) -> None:
    runs = sorted(path.name for path in (timing.ROOT / "runs").glob("*"))
    small = ["--model", "tiny", "--n-layer", "1", "--d-model", "32", "--context", "16"]
    found = timing.measure(["python", "-m", "torch_ref.train", *small, "--batch-size", "1"])
    assert found["tokens_per_second"] > 0 and found["peak_bytes"] > 2**20
    assert list(folder.iterdir()) == []
    assert sorted(path.name for path in (timing.ROOT / "runs").glob("*")) == runs
