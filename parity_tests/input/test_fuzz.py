"""Untrusted input never crashes or hangs a reader, and takes bounded memory.

The same few hundred cases each time; others, and as many as one likes, with `--fuzz N`.
"""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow.parquet import ParquetFile

from benchmarks import report
from lockstep import results
from lockstep.check import mapping, trace
from lockstep.config import config, huggingface, islands
from lockstep.data import corpus, prepared, records, tokenizer
from lockstep.data import stream as data_stream
from lockstep.errors import UserError
from lockstep.files import stream, untrusted
from lockstep.monitor import gaps
from lockstep.run import checkpoint, directory, record, runlog
from lockstep.train import trainer
from lockstep.weights import huggingface as folder
from lockstep.weights import llmc, nanogpt
from parity_tests.input import fuzz
from parity_tests.input.bounds import TooSlow, limit
from parity_tests.input.readers import READERS
from parity_tests.tiers import tier

CASES = 500
BY_NAME = {reader.name: reader for reader in READERS}


@tier("rest", guard="a bug planted in each reader")
@pytest.mark.parametrize("name", BY_NAME)
def test_reader(name: str, request: pytest.FixtureRequest) -> None:
    asked = request.config.getoption("--fuzz")
    outcome = fuzz.run(BY_NAME[name], asked or CASES, random=asked is not None)
    assert outcome.cases > CASES / 2  # a strategy that has run dry says nothing
    assert outcome.accepted > 0, "nothing was accepted: what is read is never looked at"


def trusting_entry(name: str, tensor: Any) -> stream.TensorEntry:
    """`stream._entry` without what it refuses."""
    return stream.TensorEntry(stream.DTYPES[tensor.get_dtype()], tuple(tensor.get_shape()))


def python_s_own(file: Path, *, limit: int) -> Any:
    return json.loads(file.read_text())


def trusting_open(parquet: Any, file: Path) -> ParquetFile:
    """`records._open` without its `except`."""
    return ParquetFile(file)


def anything(*_: object) -> bool:
    return True


# What a reader might forget: in which module, under which name, what stands there in its place
BUGS: list[tuple[str, Any, str, Any]] = [
    ("checkpoint", stream, "_entry", trusting_entry),
    ("checkpoint", record, "_is_whole", anything),
    ("checkpoint", record, "read_json", python_s_own),
    ("config", directory, "read_json", python_s_own),
    ("config", config, "require_fields", anything),
    ("run", trainer, "restore", lambda config, run, warn: checkpoint.latest(run, warn)),
    ("log", runlog, "_is_row", lambda row: "step" in row),
    ("log", untrusted, "_finite", float),
    ("data", corpus, "require", anything),
    ("rows", records, "parse_json", lambda line, **_: json.loads(line)),
    ("parquet", records, "_open", trusting_open),
    ("bin", data_stream, "require", anything),
    ("tokenizer", tokenizer, "_ask", lambda function, *given, **named: function(*given, **named)),
    ("curves", gaps, "read_json", lambda file, **_: json.loads(file.read_text())),
    ("prepared", prepared, "require_fields", anything),
    ("plan", huggingface._Reader, "count", lambda self, name: self.get(name)),
    ("weights", folder, "require", anything),
    ("llmc", llmc, "require", anything),
    ("ckpt", nanogpt, "require_fields", anything),
    ("islands", islands, "translate", str),
    ("result", results, "parse_json", lambda line, **_: json.loads(line)),
    ("report", report, "UserError", ValueError),
    ("trace", trace, "_problem", lambda about: ""),
    ("map", mapping, "require", anything),
]


@pytest.mark.parametrize(("name", "module", "function", "bug"), BUGS)
def test_a_planted_bug_is_found(
    name: str, module: Any, function: str, bug: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, function, bug)
    with pytest.raises((Exception, TooSlow)) as caught:
        # It ends at the first. hypothesis also draws constants of the modules that happen to be
        # loaded, so that which case it is depends on what ran before.
        fuzz.run(BY_NAME[name], 10 * CASES, random=False, shrink=False)
    assert not isinstance(caught.value, UserError)
    assert f"{bug.__name__}() " not in str(caught.value)  # which is called as what it stands for


def test_too_much_time_and_memory_are_seen() -> None:
    with pytest.raises(TooSlow), limit(seconds=0.1):
        while True:
            pass
    with pytest.raises(TooSlow), limit(patience=0.1):
        time.sleep(60)
    with pytest.raises(MemoryError), limit():
        np.empty(2**28)
    np.empty(2**26)  # and afterwards it may be had again
