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
                         "steps": 3, "data": str(data)}, accelerator=False)  # fmt: skip
    directory.make(path)
    sha = load(str(data)).sha256
    record = directory.Record(config=config, framework="torch", data_sha256=sha, details={})
    directory.write_record(path, record)
    if saved:
        state = initial_state(config)
        checkpoint.save(path, type(state)(**{**vars(state), "step": 3}), keep=1)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data and runs, good and bad."""
    here = tmp_path_factory.mktemp("place")
    (here / "text.txt").write_text(TEXT)
    (here / "empty.txt").write_text("")
    (here / "notes.md").write_text("notes")
    (here / "port.py").write_text("")
    (here / "spoilt.trace").mkdir()
    (here / "spoilt.trace" / "trace.json").write_text("{")
    for name in ("odd", "half", "big"):
        (here / name).mkdir()
        (here / name / "train.bin").write_bytes(np.arange(1000, 1500, dtype="<u2").tobytes())
    (here / "odd" / "train.bin").write_bytes(b"abc")
    (here / "odd" / "val.bin").write_bytes(b"abcd")
    (here / "big" / "val.bin").write_bytes(np.full(500, 1000, dtype="<u2").tobytes())
    (here / "big" / "train.bin").write_bytes(np.full(500, 1000, dtype="<u2").tobytes())
    make_run(here / "run", here / "text.txt", saved=True)
    make_run(here / "unsaved", here / "text.txt", saved=False)
    make_run(here / "changed", here / "text.txt", saved=True)
    record = json.loads((here / "changed" / "config.json").read_text())
    record["data_sha256"] = "0" * 64
    (here / "changed" / "config.json").write_text(json.dumps(record))
    make_run(here / "torn", here / "text.txt", saved=True)
    with next((here / "torn").rglob("mu.safetensors")).open("r+b") as file:
        file.truncate(100)
    edits: dict[str, Callable[[dict[str, Any]], object]] = {
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
        "path": lambda record: record.update(data_sha256="../../secret"),
    }
    for name, edit in edits.items():
        make_run(here / name, here / "text.txt", saved=True)
        record = json.loads((here / name / "config.json").read_text())
        edit(record)
        (here / name / "config.json").write_text(json.dumps(record))
    texts = {
        "garbage": "{",
        "deep": "[" * 100_000,
        "foreign": '{"format": 1, "model": "llama"}',
        "list": "[]",
        "huge": "[" + " " * 1_000_001 + "]",
        "stranger": '{"architectures": ["LlamaForCausalLM"]}',  # a model of another tool
    }
    for name, text in texts.items():
        (here / name).mkdir()
        (here / name / "config.json").write_text(text)
    (here / "stranger" / "checkpoints").mkdir()
    (here / "stranger" / "checkpoints" / "precious.bin").write_bytes(b"1")
    (here / "binary").mkdir()
    (here / "binary" / "config.json").write_bytes(b"\xff\xfe\0")
    (here / "hollow").mkdir()
    (here / "hollow" / "config.json").touch()
    os.truncate(here / "hollow" / "config.json", 1 << 40)
    make_run(here / "linked", here / "text.txt", saved=True)
    (here / "linked" / "log.jsonl").symlink_to(here / "text.txt")
    for name, text in (("spoilt", "{"), ("strange", "{}")):
        (here / f"{name}.jsonl").write_text(text)
    (here / "loop.txt").symlink_to("loop.txt")
    for name in ("pipe.txt", "pipe.json"):
        os.mkfifo(here / name)
    return here


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
