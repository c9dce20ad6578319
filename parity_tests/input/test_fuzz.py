"""Hostile files never crash or hang a reader, and take bounded memory.

The forms that people exchange are fuzzed, always with the same cases; `--fuzz N` draws N others.
Each reader has one hostile example for each bug that is planted in it.
"""

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from pyarrow.parquet import ParquetFile

from benchmarks import report
from lockstep import results
from lockstep.check.pairing import by_names
from lockstep.check.sides import trace
from lockstep.config import config, huggingface, islands
from lockstep.data import corpus, prepared, records, tokenizer
from lockstep.data import stream as data_stream
from lockstep.errors import require
from lockstep.files import stream, untrusted
from lockstep.monitor import gaps
from lockstep.plan import shape
from lockstep.run import checkpoint, directory, record, runlog
from lockstep.train import trainer
from lockstep.weights import huggingface as folders
from lockstep.weights import llmc, nanogpt
from parity_tests.input.bounds import TooSlow, check_refusal, limit
from parity_tests.input.forms import ARGUMENTS, FORMS, HEADER, ckpt, llmc_file, place
from parity_tests.input.hostile_runs import CONFIG, CONFIG_JSON, make_run
from parity_tests.input.mutations import Files
from parity_tests.tiers import tier

CASES = 500


@pytest.mark.parametrize("name", FORMS)
def test_sound_files_are_read(name: str, tmp_path: Path) -> None:
    form = FORMS[name]
    for files in form.made():
        assert form.accepts(files, tmp_path)
        assert form.accepts(form.sign(files), tmp_path)


@tier("rest", guard="a bug planted in each reader")
@pytest.mark.parametrize("name", FORMS)
def test_hostile_files(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Refused or accepted, but no crash: `Form.accepts` says what is looked at."""
    asked, outcomes = request.config.getoption("--fuzz"), Counter[bool]()

    @settings(
        max_examples=asked or CASES, derandomize=asked is None, database=None, deadline=None,
        suppress_health_check=list(HealthCheck), phases=(Phase.generate, Phase.shrink),
        report_multiple_bugs=False,
    )  # fmt: skip
    @given(files=FORMS[name].hostile())
    def each(files: Files) -> None:
        outcomes[FORMS[name].accepts(files, tmp_path)] += 1

    each()
    assert outcomes.total() > CASES / 2  # a strategy that has run dry says nothing
    assert outcomes[True] > 0, "nothing was accepted: what is read is never looked at"


def python_s_own(file: Path, *, limit: int) -> Any:
    return json.loads(file.read_text())


def anything(*_: object) -> bool:
    return True


# --- bugs that are planted in readers


class Example(NamedTuple):
    """A hostile example for a reader, and the bug that accepts it or that it crashes."""

    reader: str
    module: Any
    function: str
    bug: Any
    files: Files
    read: Callable[[Path], Any]


def trusting_open(parquet: Any, file: Path) -> ParquetFile:
    """`records._open` without its `except`."""
    return ParquetFile(file)


def trusting_entry(name: str, tensor: Any) -> stream.TensorEntry:
    """`stream._entry` without what it refuses."""
    return stream.TensorEntry(stream.DTYPES[tensor.get_dtype()], tuple(tensor.get_shape()))


def exchanged(form: str, module: Any, function: str, bug: Any, **changed: bytes) -> Example:
    """Makes an example of a form in which some files are changed, named by their beginnings."""
    files = FORMS[form].made()[0]
    other = {name: changed.get(name.partition(".")[0], content) for name, content in files.items()}
    return Example(form, module, function, bug, FORMS[form].sign(other), FORMS[form].read)


def edited(form: str, name: str, old: bytes, new: bytes) -> bytes:
    content = FORMS[form].made()[0][name]
    assert old in content
    return content.replace(old, new)


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The log leaves out what is no row."""
    rows = list(runlog.rows(folder / "log.jsonl"))
    require(bool(rows), "log.jsonl", "", "no row")
    return rows


def read_run(folder: Path) -> Any:
    """A config.json beside a checkpoint of another model."""
    make_run(folder / "run")
    return trainer.restore(CONFIG.replace(vocab=2), folder / "run", lambda line: None)


def int32(*numbers: int) -> bytes:
    """A header of llm.c's."""
    return np.array([*numbers, *[0] * (256 - len(numbers))], "<i4").tobytes()


MEASURED = dict.fromkeys(results.MEASURED) | {"device": "cpu"}
EXAMPLES = [
    exchanged("checkpoint", stream, "_entry", trusting_entry,
              weights=edited("checkpoint", "weights.safetensors", b'"F64"', b'"I64"')),
    exchanged("checkpoint", record, "_is_whole", anything,
              state=edited("checkpoint", "state.json", b'"step": 1000', b'"step": -1')),
    exchanged("checkpoint", record, "read_json", python_s_own, state=3000 * b"["),
    exchanged("prepared", prepared, "require_fields", anything, data=b"{}"),
    exchanged("weights", folders, "require", anything, **{
        file.partition(".")[0]: edited("weights", file, b"model.norm.weight", b"model.norm.waight")
        for file in ("model.safetensors.index.json", "a.safetensors")}),
    exchanged("llmc", llmc, "require", anything, a=llmc_file([20240326, 4, *HEADER[2:]])),
    exchanged("ckpt", nanogpt, "require_fields", anything, ckpt=ckpt(ARGUMENTS | {"bias": 1})),
    exchanged("trace", trace, "_problem", lambda about: "", trace=b"{}"),
    exchanged("map", by_names, "require", anything, map=b'{"tensors": 3}'),
    Example("config", directory, "read_json", python_s_own, {"config.json": b"0"},
            directory.read_record),
    Example("config", config, "require_fields", anything,
            {"config.json": json.dumps(CONFIG_JSON | {"config": 0}).encode()},
            directory.read_record),
    Example("run", trainer, "restore", lambda config, run, warn: checkpoint.latest(run, warn), {},
            read_run),
    Example("log", runlog, "_is_row", lambda row: "step" in row, {"log.jsonl": b'{"step": 1}'},
            read_log),
    Example("log", untrusted, "_finite", float,
            {"log.jsonl": b'{"kind": "eval", "step": 1, "val_loss": 1e999}'}, read_log),
    Example("data", corpus, "require", anything, {"train.bin": 40 * b"a"},
            lambda folder: corpus.load(str(folder))),
    Example("rows", records, "parse_json", lambda line, **_: json.loads(line), {"a.jsonl": b"{"},
            lambda folder: corpus.load(str(folder / "a.jsonl"))),
    Example("parquet", records, "_open", trusting_open, {"a.parquet": b"PAR1"},
            lambda folder: corpus.load(str(folder / "a.parquet"))),
    Example("bin", data_stream, "require", anything,
            {"a.bin": int32(20240520, 1, 40) + 79 * b"a"},
            lambda folder: corpus.load(str(folder / "a.bin"))),
    Example("tokenizer", tokenizer, "_ask", lambda function, *given, **named: function(*given,
            **named), {"tokenizer.json": b"0"}, tokenizer.FromFile),
    Example("curves", gaps, "read_json", lambda file, **_: json.loads(file.read_text()),
            {"curves.json": 200_000 * b"["}, gaps.read),
    Example("plan", huggingface._Reader, "get", lambda self, key: self.content.get(key.name),
            {"config.json": b'{"num_attention_heads": 4, "hidden_size": 64, "vocab_size": 256}'},
            lambda folder: shape.of(str(folder / "config.json"), None)),
    Example("islands", islands, "translate", str, {},
            lambda folder: CONFIG.replace(fp32_islands="*x")),
    Example("result", results, "parse_json", lambda line, **_: json.loads(line),
            {"power.json": b"\0"}, lambda folder: results.read(folder / "power.json")),
    Example("report", report, "UserError", ValueError,
            {"a.jsonl": json.dumps({"name": "a", "cell": 0, "measured": MEASURED}).encode()},
            lambda folder: report.write(folder / "a.jsonl")),
]  # fmt: skip


BUGS = EXAMPLES


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.reader)
def test_an_example_is_refused(example: Example, tmp_path: Path) -> None:
    place(example.files, tmp_path)
    check_refusal(lambda: example.read(tmp_path / "given"))


@pytest.mark.parametrize(("reader", "module", "function", "bug", "files", "read"), EXAMPLES)
def test_a_planted_bug_accepts_an_example_or_crashes(
    reader: str, module: Any, function: str, bug: Any, files: Files, read: Any, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(module, function, bug)
    place(files, tmp_path)
    with pytest.raises((Exception, pytest.fail.Exception)) as caught:
        check_refusal(lambda: read(tmp_path / "given"))
    assert f"{getattr(bug, '__name__', '')}() " not in str(caught.value)


def test_too_much_time_and_memory_are_seen() -> None:
    with pytest.raises(TooSlow), limit(seconds=0.1):
        while True:
            pass
    with pytest.raises(TooSlow), limit(patience=0.1):
        time.sleep(60)
    with pytest.raises(MemoryError), limit():
        np.empty(2**28)
    np.empty(2**26)  # and afterwards it may be had again
