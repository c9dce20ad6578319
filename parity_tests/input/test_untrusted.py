"""Malformed files are refused at once: not regular, not JSON, linked, too large.

Every file of the forms that people exchange, and the files of a run.
"""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks import report
from lockstep import results
from lockstep.config import DEEPEST
from lockstep.data import corpus, tokenizer
from lockstep.errors import LONGEST, UserError, require, why
from lockstep.files import untrusted
from lockstep.model.state import initial_state
from lockstep.monitor import gaps
from lockstep.plan import shape
from lockstep.run import checkpoint, directory, runlog
from lockstep.run.record import FILES, RECORD
from lockstep.train import trainer
from parity_tests.input.bounds import check_refusal, limit
from parity_tests.input.forms import ARGUMENTS, FORMS, Files, ckpt, damaged, place
from parity_tests.input.hostile_runs import CONFIG, CONFIG_JSON, TRAIN, make_run, newest
from parity_tests.runs.checkpoints import state
from parity_tests.tiers import tier

CASES = [(form, name) for form in FORMS for name in sorted(FORMS[form].made()[0])]
JSON = [case for case in CASES if case[1].endswith(".json")]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


NO_FILES: dict[str, Callable[[Path], object]] = {
    "folder": Path.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "nothing": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("kind", NO_FILES)
@pytest.mark.parametrize(("form", "name"), CASES)
def test_not_a_regular_file(form: str, name: str, kind: str, tmp_path: Path) -> None:
    place(FORMS[form].made()[0], tmp_path)
    path = tmp_path / "given" / name
    path.unlink()
    NO_FILES[kind](path)
    check_refusal(lambda: FORMS[form].read(tmp_path / "given"))


@pytest.mark.parametrize(("form", "name"), JSON)
@pytest.mark.parametrize(
    "text",
    [b'{"format": 1, "format": 1}', b'{"format": NaN}', b'{"format": 1e999}', b"[]", b"{"],
    ids=repr,
)
def test_malformed_json(form: str, name: str, text: bytes, tmp_path: Path) -> None:
    """A map may have other fields, and so it is accepted where the JSON is."""
    accepted = FORMS[form].accepts({**FORMS[form].made()[0], name: text}, tmp_path)
    assert not accepted or (form == "map" and type(json.loads(text)) is dict)


@tier("rest", guard="a hostile example for each reader")
@pytest.mark.parametrize("form", FORMS)
def test_damaged_files(form: str, tmp_path: Path) -> None:
    """Each is refused in a line, or accepted: none crashes its reader, nor takes it long."""
    outcomes = Counter[bool]()
    for files in FORMS[form].made():
        assert FORMS[form].accepts(files, tmp_path)
        assert FORMS[form].accepts(FORMS[form].sign(files), tmp_path)
        for changed in damaged(files):
            outcomes[FORMS[form].accepts(FORMS[form].sign(changed), tmp_path)] += 1
    assert outcomes[False]


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
    exchanged("weights", **{
        file.partition(".")[0]: edited("weights", file, b"model.norm.weight", b"model.norm.waight")
        for file in ("model.safetensors.index.json", "a.safetensors")}),
    exchanged("ckpt", ckpt=ckpt(ARGUMENTS | {"bias": 1})),
    exchanged("ckpt", ckpt=ckpt({})),
    exchanged("trace", trace=b"{}"),
    exchanged("trace", trace=edited("trace", "trace.json", b'"kinds": {', b'"kinds": 0, "x": {')),
    exchanged("map", map=b'{"tensors": 3}'),
    exchanged("map", map=edited("map", "map.json", b'"axes": [0, 1]', b'"axes": [0, 2]')),
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
    Example("curves", {"curves.json": b"["}, gaps.read),
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


def test_a_log_of_one_long_line_takes_no_memory(run: Path) -> None:
    with (run / "log.jsonl").open("ab") as file:
        file.write(b'{"kind": "' + b"x" * 100_000_000)
    with limit(room=20 << 20, seconds=10):
        assert [row["step"] for row in runlog.rows(run / "log.jsonl")] == [1]


def test_why_a_file_was_not_read_is_said_without_its_name() -> None:
    """An error that no system call gave has no `strerror`."""
    assert why(FileNotFoundError(2, "No such file", "a.json")) == "No such file"
    assert why(OSError("truncated")) == "truncated"
    assert why(untrusted.Refused("no row")) == "no row"


# --- links in a run

INSIDE: dict[str, Callable[[Path], Any]] = {
    "config.json": directory.read_record,
    "log.jsonl": lambda run: list(runlog.rows(run / "log.jsonl")),
    **{
        f"checkpoints/step_00000000/{name}": lambda run: checkpoint.load(newest(run))
        for name in (RECORD, *FILES.values())
    },
}


@pytest.mark.parametrize("file", INSIDE)
def test_a_link_out_of_the_run(file: str, run: Path, tmp_path: Path) -> None:
    """The file elsewhere is in order, so that the link alone is wrong."""
    INSIDE[file](run)
    (run / file).rename(tmp_path / "elsewhere")
    (run / file).symlink_to(tmp_path / "elsewhere")
    check_refusal(lambda: INSIDE[file](run), "link")


@pytest.mark.parametrize("name", directory.OWNED)
def test_a_run_with_a_link_is_not_read(name: str, run: Path, tmp_path: Path) -> None:
    for folder in ("init", "tensorboard"):
        (run / folder).mkdir()
    (run / "sample.txt").touch()
    (run / name).rename(tmp_path / "elsewhere")
    (run / name).symlink_to(tmp_path / "elsewhere")
    check_refusal(lambda: directory.read_record(run), name, "link")


def test_a_linked_checkpoint_is_none(run: Path, tmp_path: Path) -> None:
    path = newest(run)
    path.rename(tmp_path / path.name)
    path.symlink_to(tmp_path / path.name)
    assert checkpoint.listing(run) == []
    checkpoint.save(run, state(2000), keep=1)  # which deletes the others
    assert (tmp_path / path.name / RECORD).exists()


def test_links_are_not_written_through(run: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for name in ("config.json", "log.jsonl", "config.json.tmp", "log.jsonl.tmp"):
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(precious)
    record = directory.Record(config=CONFIG, framework="jax", data_tokens=(90, 10), details={})
    directory.write_record(run, record)
    with runlog.RunLog(run / "log.jsonl", last_step=0) as log:
        log.write({**TRAIN, "step": 1})
    assert precious.read_text() == "mine"
    assert directory.read_record(run).config == CONFIG


# --- names and sizes that a config gives


@pytest.mark.parametrize("sizes", ["90", [90], [90, 1.5]])
def test_sizes_of_data_are_two_counts(sizes: Any, run: Path) -> None:
    (run / "config.json").write_text(json.dumps(CONFIG_JSON | {"data_tokens": sizes}))
    check_refusal(lambda: directory.read_record(run), "config.json")


def test_record_of_release_0_2_0_is_read(run: Path) -> None:
    """It has the data's SHA-256, and no numbers of tokens."""
    content = CONFIG_JSON | {"data_sha256": 64 * "0"}
    del content["data_tokens"]
    (run / "config.json").write_text(json.dumps(content))
    assert directory.read_record(run).data_tokens is None


@pytest.mark.parametrize("data", ["a\0.txt", "\ud800.txt", "/dev/zero", 300 * "x" + ".txt"])
def test_data_that_no_file_can_be_named(data: str) -> None:
    check_refusal(lambda: corpus.load(data), "--data")


@pytest.mark.parametrize(
    "change",
    [
        {"n_layer": 10**6}, {"context": 2**31 - 1}, {"d_model": 10**6}, {"vocab": 10**9},
        {"accum": 2**31 - 1}, {"batch_size": 2**31 - 1}, {"eval_batches": 2**31 - 1},
        {"fp32_islands": 10**5 * "head,"}, {"fp32_islands": 5000 * "*a" + "b"},
        {"formats": 10**5 * "head=fp8,"},
    ],
    ids=lambda change: str(change)[:30],
)  # fmt: skip
def test_a_run_that_says_it_is_huge(change: dict[str, Any], run: Path) -> None:
    record = json.loads(json.dumps(CONFIG_JSON))
    for section in record["config"].values():
        section |= {name: value for name, value in change.items() if name in section}
    (run / "config.json").write_text(json.dumps(record))
    check_refusal(lambda: trainer.restore(directory.read_record(run).config, run, print))


@tier("rest", guard="limits on what is read, by each reader")
def test_the_deepest_model_has_a_record_and_a_header_that_are_read(tmp_path: Path) -> None:
    """With everything that has a name, in a width of 2."""
    deep = CONFIG.replace(
        n_layer=DEEPEST, norm="layernorm", mlp="gelu", position="learned", bias=True
    )
    initial = initial_state(deep)
    path = checkpoint.save(tmp_path, initial, keep=1)
    with limit(seconds=30):
        assert len(checkpoint.load(path).params) == len(initial.params)


def test_untrusted_text_does_not_move_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    """A name in config.json comes into the lines that a resumed run prints."""
    runlog.Display(3, 0).say("a\x1b[2Jb\r\u202ec\nd")
    assert capsys.readouterr().out == "a\\x1b[2Jb\\r\\u202ec\nd\n"
    line = str(UserError("--data \x1b]0;x\x07\n" + 5000 * "a" + "; use other data"))
    assert line.startswith("--data \\x1b]0;x\\x07\\na") and line.endswith("a; use other data")
    assert len(line) == LONGEST + len(" ... ")
