"""Hostile files never crash or hang a reader, and take bounded memory.

The forms that people exchange are fuzzed, always with the same cases; `--fuzz N` draws N others.
Each reader refuses one hostile example or more.
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

from benchmarks import report
from lockstep import results
from lockstep.data import corpus, tokenizer
from lockstep.errors import require
from lockstep.monitor import gaps
from lockstep.plan import shape
from lockstep.run import directory, runlog
from lockstep.train import trainer
from parity_tests.input.bounds import TooSlow, check_refusal, limit
from parity_tests.input.forms import ARGUMENTS, FORMS, ckpt, place
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


@tier("rest", guard="a hostile example for each reader")
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


# --- one hostile example or more for each reader


class Example(NamedTuple):
    """Files that a reader refuses."""

    reader: str
    files: Files
    read: Callable[[Path], Any]


def exchanged(form: str, **changed: bytes) -> Example:
    """Makes an example of a form in which some files are changed, named by their beginnings."""
    files = FORMS[form].made()[0]
    other = {name: changed.get(name.partition(".")[0], content) for name, content in files.items()}
    return Example(form, FORMS[form].sign(other), FORMS[form].read)


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


MEASURED = dict.fromkeys(results.MEASURED) | {"device": "cpu"}
EXAMPLES = [
    exchanged("checkpoint", weights=edited(
        "checkpoint", "weights.safetensors", b'"F64"', b'"I64"')),
    exchanged("checkpoint", state=edited(
        "checkpoint", "state.json", b'"step": 1000', b'"step": -1')),
    exchanged("checkpoint", state=3000 * b"["),
    exchanged("prepared", data=b"{}"),
    exchanged("weights", **{
        file.partition(".")[0]: edited("weights", file, b"model.norm.weight", b"model.norm.waight")
        for file in ("model.safetensors.index.json", "a.safetensors")}),
    exchanged("ckpt", ckpt=ckpt(ARGUMENTS | {"bias": 1})),
    exchanged("trace", trace=b"{}"),
    exchanged("map", map=b'{"tensors": 3}'),
    Example("config", {"config.json": b"0"}, directory.read_record),
    Example("config", {"config.json": json.dumps(CONFIG_JSON | {"config": 0}).encode()},
            directory.read_record),
    Example("run", {}, read_run),
    Example("log", {"log.jsonl": b'{"step": 1}'}, read_log),
    Example("log", {"log.jsonl": b'{"kind": "eval", "step": 1, "val_loss": 1e999}'}, read_log),
    Example("data", {"train.bin": 40 * b"a"}, lambda folder: corpus.load(str(folder))),
    Example("rows", {"a.jsonl": b"{"}, lambda folder: corpus.load(str(folder / "a.jsonl"))),
    Example("bin", {"a.bin": 79 * b"a"}, lambda folder: corpus.load(str(folder / "a.bin"))),
    Example("tokenizer", {"tokenizer.json": b"0"}, tokenizer.FromFile),
    Example("curves", {"curves.json": 200_000 * b"["}, gaps.read),
    Example("plan", {
        "config.json": b'{"num_attention_heads": 4, "hidden_size": 64, "vocab_size": 256}'},
            lambda folder: shape.of(str(folder / "config.json"), None)),
    Example("islands", {}, lambda folder: CONFIG.replace(fp32_islands="*x")),
    Example("result", {"power.json": b"\0"},
            lambda folder: results.read(folder / "power.json")),
    Example("report",
            {"a.jsonl": json.dumps({"name": "a", "cell": 0, "measured": MEASURED}).encode()},
            lambda folder: report.write(folder / "a.jsonl")),
]  # fmt: skip


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.reader)
def test_an_example_is_refused(example: Example, tmp_path: Path) -> None:
    place(example.files, tmp_path)
    check_refusal(lambda: example.read(tmp_path / "given"))


def test_too_much_time_and_memory_are_seen() -> None:
    with pytest.raises(TooSlow), limit(seconds=0.1):
        while True:
            pass
    with pytest.raises(TooSlow), limit(patience=0.1):
        time.sleep(60)
    with pytest.raises(MemoryError), limit():
        np.empty(2**28)
    np.empty(2**26)  # and afterwards it may be had again
