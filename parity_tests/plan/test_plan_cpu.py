"""`lockstep plan --measure`."""

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli import commands
from lockstep.plan import timing
from parity_tests.tiers import tier

# --- --measure


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
    """What has temporary files, and must have none when all is done."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


MEASURED = ["plan", "--model", "tiny", "--device", "cpu", "--framework", "torch", "--measure"]


def test_three_candidates_are_timed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer()
    monkeypatch.setattr(subprocess, "run", trainer)
    assert commands.main(MEASURED) == 0
    text = capsys.readouterr().out
    assert text.count("measured here: torch, ") == len(trainer.commands) == 3
    assert "100 tokens/s (" in text and "predicted), peak 1.00 GiB" in text
    recommended = text.partition("recommended: ")[2].partition("\n")[0].split()
    assert trainer.commands[0][1 : len(recommended)] == recommended[1:]
    kinds = {row.partition(" x ")[0] for row in text.splitlines() if "measured here" in row}
    assert len(kinds) == 3  # of policy and remat
    assert len({tuple(words[:-1]) for words in trainer.commands}) == 3  # the last is its folder
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
    assert all("100 tokens/s" in row for row in lines[1:]) and len(lines) == 3
    assert list(folder.iterdir()) == []


@tier("rest", guard="what is made of its time")
def test_a_trainer_is_really_timed(folder: Path) -> None:
    runs = sorted(path.name for path in (timing.ROOT / "runs").glob("*"))
    small = ["--model", "tiny", "--n-layer", "1", "--d-model", "32", "--context", "16"]
    found = timing.measure(["python", "-m", "torch_ref.train", *small, "--batch-size", "1"])
    assert found["tokens_per_second"] > 0 and found["peak_bytes"] > 2**20
    assert list(folder.iterdir()) == []
    assert sorted(path.name for path in (timing.ROOT / "runs").glob("*")) == runs
