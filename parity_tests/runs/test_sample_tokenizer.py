"""`lockstep sample` of a run with a tokenizer, and of one on bytes that lie in a folder."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from lockstep.cli import commands
from lockstep.data.tokenizer import load
from parity_tests.runs.fake_runs import train
from parity_tests.weights.folders import config_of, make, run_of

WORDS = {"a": 0, "dog": 1, "barks": 2, "<end>": 3, "<unk>": 4}


def test_it_reads_and_writes_by_the_runs_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there, run = make(tmp_path / "there", "gpt2"), tmp_path / "run"
    words = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(there / "tokenizer.json"))
    (there / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    run_of(run, "torch", config_of(there, policy="fp32").replace(tokenizer=str(there)))
    (there / "tokenizer.json").unlink()  # the run has its own
    how = ["--device", "cpu", "--length", "9", "--temperature", "1", "--top-k", "0"]
    assert commands.main(["sample", str(run), "--prompt", "a dog", *how]) == 0
    text = capsys.readouterr().out.split()
    assert text[:2] == ["a", "dog"] and 2 < len(text) <= 11
    assert set(text) <= WORDS.keys() - {"<end>"}
    outside = run / "init" / "tokenizer.json"
    outside.rename(tmp_path / "elsewhere.json")
    outside.symlink_to(tmp_path / "elsewhere.json")
    assert commands.main(["sample", str(run), "--prompt", "a", *how]) == 2
    assert "symbolic link" in capsys.readouterr().err


def test_a_tokenizer_is_kept_whole(tmp_path: Path) -> None:
    """The tokenizer of `--init` has an end, which training by the named one has not seen."""
    there, named, run = make(tmp_path / "there", "gpt2"), tmp_path / "named", tmp_path / "run"
    named.mkdir()
    for folder in (there, named):
        Tokenizer(models.WordLevel(WORDS, unk_token="<unk>")).save(str(folder / "tokenizer.json"))
    (there / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    run_of(run, "torch", config_of(there, policy="fp32").replace(tokenizer=str(named)))
    assert {"config.json", "tokenizer.json"} <= {file.name for file in (run / "init").iterdir()}
    assert load(str(run / "init")).end == []


@pytest.mark.parametrize("data", ["text.txt.tokens", "texts"])
def test_a_run_on_bytes_in_a_folder_is_sampled(
    data: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run names data that `lockstep data` made without a tokenizer."""
    monkeypatch.setenv("LOCKSTEP_CACHE", str(place / "cache"))
    (place / "texts").mkdir()
    shutil.copy("text.txt", "texts")
    assert commands.main(["data", "text.txt"]) == 0
    assert train(f"--data {data}") == 0
    capsys.readouterr()
    assert commands.main(["sample", "run", "--prompt", "to be", "--length", "3"]) == 0
    assert capsys.readouterr().out.startswith("to be")
