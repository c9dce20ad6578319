"""A folder with data and runs, good and bad; the check that a mistake made there is one line."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.config import from_flags
from lockstep.data.corpus import load
from lockstep.model.state import initial_state
from lockstep.run import checkpoint, directory

TEXT = "to be or not to be, that is the question. " * 40


def make_run(path: Path, data: Path, *, saved: bool) -> None:
    config = from_flags({"model": "tiny", "n_layer": 1, "d_model": 8, "n_head": 1, "context": 8,
                         "accum": 1, "remat": "none",
                         "steps": 3, "data": str(data)}, accelerator=False)  # fmt: skip
    directory.make(path)
    sizes = load(str(data)).sizes
    record = directory.Record(config=config, framework="torch", data_tokens=sizes, details={})
    directory.write_record(path, record)
    if saved:
        state = initial_state(config)
        checkpoint.save(path, type(state)(**{**vars(state), "step": 3}), keep=1)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data and runs, good and bad."""
    here = tmp_path_factory.mktemp("place")
    _make_data(here)
    _make_runs(here)
    _make_edited_runs(here)
    _make_other_configs(here)
    _make_results_and_traces(here)
    _make_no_files(here)
    return here


def _make_data(here: Path) -> None:
    """Texts, and folders of tokens; some of them of odd length, without a part, or past the
    vocabulary."""
    for name, text in (("text.txt", TEXT), ("empty.txt", ""), ("notes.md", "notes"),
                       ("port.py", "")):  # fmt: skip
        (here / name).write_text(text)
    for name in ("odd", "half", "big"):
        (here / name).mkdir()
    (here / "odd" / "train.bin").write_bytes(b"abc")
    (here / "odd" / "val.bin").write_bytes(b"abcd")
    (here / "half" / "train.bin").write_bytes(np.arange(1000, 1500, dtype="<u2").tobytes())
    for part in ("train", "val"):
        (here / "big" / f"{part}.bin").write_bytes(np.full(500, 1000, dtype="<u2").tobytes())


def _make_runs(here: Path) -> None:
    """A whole one; without a checkpoint, with a torn one, with a log that is a link."""
    for name, saved in (("run", True), ("unsaved", False), ("torn", True), ("linked", True)):
        make_run(here / name, here / "text.txt", saved=saved)
    with next((here / "torn").rglob("mu.safetensors")).open("r+b") as file:
        file.truncate(100)
    (here / "linked" / "log.jsonl").symlink_to(here / "text.txt")


def _make_edited_runs(here: Path) -> None:
    """Each with a config.json that somebody changed."""
    edits: dict[str, Callable[[dict[str, Any]], object]] = {
        "changed": lambda record: record.update(data_tokens=[1000, 100]),
        "edited": lambda record: record["config"]["model"].update(n_layer=2),
        "typed": lambda record: record["config"]["model"].update(n_layer=1.0),
        "nan": lambda record: record["config"]["optim"].update(lr=float("nan")),
        "older": lambda record: record["config"]["optim"].pop("seed"),
        "future": lambda record: record.update(format=2),
        "tokens": lambda record: record["config"]["data"].update(data="big"),
        "narrow": lambda record: record["config"]["model"].update(vocab=100),
        "long": lambda record: record["config"]["model"].update(context=2**20),
        "vast": lambda record: record["config"]["optim"].update(batch_size=2**31 - 1),
        "endless": lambda record: record["config"]["model"].update(n_layer=10**6),
    }
    for name, edit in edits.items():
        make_run(here / name, here / "text.txt", saved=True)
        record = json.loads((here / name / "config.json").read_text())
        edit(record)
        (here / name / "config.json").write_text(json.dumps(record))


def _make_other_configs(here: Path) -> None:
    """Folders with a config.json that is none of ours."""
    texts: dict[str, bytes] = {
        "deep": b"[" * 100_000,
        "list": b"[]",
        "huge": b"[" + b" " * 1_000_001 + b"]",
        "stranger": b'{"architectures": ["LlamaForCausalLM"]}',  # a model of another tool
        "hollow": b"",
    }
    for name, text in texts.items():
        (here / name).mkdir()
        (here / name / "config.json").write_bytes(text)
    os.truncate(here / "hollow" / "config.json", 1 << 40)
    (here / "stranger" / "checkpoints").mkdir()
    (here / "stranger" / "checkpoints" / "precious.bin").write_bytes(b"1")


def _make_results_and_traces(here: Path) -> None:
    """None of which can be read."""
    (here / "spoilt.trace").mkdir()
    (here / "spoilt.trace" / "trace.json").write_text("{")
    for name, text in (("spoilt", "{"), ("strange", "{}")):
        (here / f"{name}.jsonl").write_text(text)


def _make_no_files(here: Path) -> None:
    """A link to itself, and pipes, on which a reader would wait for ever."""
    (here / "loop.txt").symlink_to("loop.txt")
    for name in ("pipe.txt", "pipe.json"):
        os.mkfifo(here / name)


def contents(folder: Path) -> dict[str, Any]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.stat().st_size < 10**7)
    return {str(path): None for path in folder.rglob("*")} | {str(f): f.read_bytes() for f in files}


def check_line(status: int, err: str, out: str, words: list[str]) -> None:
    assert status == 2, (status, err)
    assert len(err.splitlines()) == 1, err
    assert err.startswith("error: ")
    assert "Traceback" not in out + err
    for word in words:
        assert word in err, (word, err)
