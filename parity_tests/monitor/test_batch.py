"""`lockstep batch`: the rows that a step was trained on, and what counts in them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.cli import commands
from lockstep.data import batches, corpus
from lockstep.data.batch import join_tokens
from lockstep.exits import DONE
from lockstep.run import directory
from parity_tests.runs.fake_runs import train


@pytest.fixture(autouse=True)
def cache(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(place / "cache"))


def shown(capsys: Any, *words: str) -> list[str]:
    capsys.readouterr()
    assert commands.main(["batch", "run", *words]) == DONE
    return capsys.readouterr().out.splitlines()


def test_the_rows_are_those_that_were_drawn(place: Path, capsys: Any) -> None:
    assert train("--accum 3") == DONE
    config = directory.read_record(Path("run")).config
    window = batches.of_step(config, corpus.load("text.txt").train, 5 - 1)
    lines = shown(capsys, "5")
    texts = [line[4:] for line in lines if line.startswith("  | ")]
    assert texts == [bytes(row.tolist()).decode() for row in join_tokens(window).reshape(-1, 9)]
    assert lines[:2] == ["micro-batch 1 of 3", "rank 0, row 0: 8 of 8 targets count"]
    assert shown(capsys, "5", "--micro-batch", "2") == lines[5:10]
    assert shown(capsys, "6") != lines


def test_by_rank(place: Path, capsys: Any) -> None:
    """Each device of a mesh has the rows of its number."""
    assert train("--batch-size 4") == DONE
    texts = [line for line in shown(capsys, "1") if line.startswith("  |")]
    record = json.loads(Path("run/config.json").read_text())
    record["config"]["optim"]["batch_size"] = 2
    record["config"]["execution"]["mesh"] = "data=2"
    Path("run/config.json").write_text(json.dumps(record))
    lines = shown(capsys, "1", "--rank", "1")
    assert [line for line in lines if line.startswith("  |")] == texts[2:]
    assert lines[1].startswith("rank 1, row 0")


MESSAGES = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4 <b>"}]


@pytest.mark.parametrize("kind", ["pack", "stream"])
def test_what_counts_is_marked(kind: str, place: Path, capsys: Any) -> None:
    Path("a.jsonl").write_text(60 * (json.dumps({"messages": MESSAGES}) + "\n"))
    assert train(f"--data a.jsonl --rows {kind} --context 150") == DONE
    lines = shown(capsys, "1")
    assert "[[4 <b><|im_end|>\\n]]" in lines[2]
    documents = sum(line.startswith("  | <|im_start|>user") for line in lines)
    assert documents == 4 if kind == "pack" else documents < 4


def test_tokens_of_an_unknown_tokenizer_are_numbers(place: Path, capsys: Any) -> None:
    Path("t").mkdir()
    for name in ("train", "val"):
        np.arange(100, 300, dtype="<u2").tofile(f"t/{name}.bin")
    assert train("--data t --vocab 300") == DONE
    numbers = [int(word) for word in shown(capsys, "1")[2][4:].split()]
    assert numbers == list(range(numbers[0], numbers[0] + 9))
