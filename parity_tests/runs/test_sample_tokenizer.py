"""`lockstep sample` of a run with a tokenizer."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from lockstep.cli import commands
from lockstep.data.tokenizer import load
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
