"""What is absurd is refused at once: huge, hollow, deep, linked, no file at all."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep import results
from lockstep.config import DEEPEST
from lockstep.data import corpus, prepare, tokenizer
from lockstep.errors import LONGEST, UserError, why
from lockstep.files import untrusted
from lockstep.model.state import initial_state
from lockstep.plan import shape
from lockstep.run import checkpoint, directory, runlog
from lockstep.run.record import FILES, RECORD
from lockstep.train import trainer
from parity_tests.input.bounds import limit
from parity_tests.input.hostile_runs import check_refusal, hollow, make_run, newest
from parity_tests.input.readers import CONFIG, TRAIN
from parity_tests.input.readers import RECORD as CONFIG_JSON
from parity_tests.runs.checkpoints import state
from parity_tests.tiers import tier

READS: dict[str, tuple[str, Callable[[Path], Any]]] = {  # each by the file that it reads
    "config": ("config.json", directory.read_record),
    "log": ("log.jsonl", lambda run: list(runlog.rows(run / "log.jsonl"))),
    "state": (f"checkpoints/step_00000000/{RECORD}", lambda run: checkpoint.load(newest(run))),
    **{
        name: (f"checkpoints/step_00000000/{name}", lambda run: checkpoint.load(newest(run)))
        for name in FILES.values()
    },
    "plan": ("model.json", lambda run: shape.of(str(run / "model.json"), None)),
    "result": ("result.json", lambda run: results.read(run / "result.json")),
    "text": ("a.txt", lambda run: corpus.load(str(run / "a.txt"))),
    "tokens": ("train.bin", lambda run: corpus.load(str(run))),
    "rows": ("a.jsonl", lambda run: corpus.load(str(run / "a.jsonl"))),
    "manifest": ("prepared/data.json", lambda run: corpus.load(str(run / "prepared"))),
    "tokenizer": ("words/tokenizer.json", lambda run: tokenizer.load(str(run / "words"))),
}  # fmt: skip
INSIDE = ("config", "log", "state", *FILES.values())  # of a run, where nothing is a link


@pytest.fixture
def run(tmp_path: Path) -> Path:
    made = make_run(tmp_path / "run")
    for name in ("prepared", "words"):
        (made / name).mkdir()
    # fmt: off
    for name, content in (("model.json", b"{}"), ("result.json", b"{}"), ("a.txt", b"text"),
                          ("train.bin", b"abcd"), ("val.bin", b"abcd"), ("a.jsonl", b"{}"),
                          ("prepared/data.json", b"{}"), ("words/tokenizer.json", b"{}")):
        # fmt: on
        (made / name).write_bytes(content)
    return made


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("begin", [b"", b"[", b"\0" * 8], ids=["nothing", "JSON", "header"])
def test_a_terabyte_of_holes(name: str, begin: bytes, run: Path) -> None:
    file, read = READS[name]
    hollow(run / file, begin=begin)
    check_refusal(lambda: read(run), Path(file).name)


@pytest.mark.parametrize("name", ["config", "state", "plan", "result"])
@pytest.mark.parametrize(
    "text",
    [
        b"[" * 10_000, b'{"a":' * 10_000, b"9" * 100_000, b'{"a": ' + b"9" * 100_000 + b"}",
        b'{"format": 1, "format": 1}', b'{"format": NaN}', b'{"format": 1e999}', b"\xef\xbb\xbf{}",
        b'{"format": "\xff"}', b"\0", b"", b'{"format": "\\ud800"}', b"[]", b'"a"', b"null",
        b'{"bugs": []}', '{"a": 1}'.encode("utf-16"),
    ],
    ids=lambda text: repr(text[:16]),
)  # fmt: skip
def test_json_that_is_none_of_ours(name: str, text: bytes, run: Path) -> None:
    file, read = READS[name]
    (run / file).write_bytes(text)
    check_refusal(lambda: read(run), Path(file).name)


@pytest.mark.parametrize("text", [r'{"a": ["\ud800"]}', r'{"\uDFFF": 0}', r'{"a": "\ude00\ud83d"}'])
def test_half_of_a_character_is_refused(text: str, tmp_path: Path) -> None:
    """What has one can be neither written, nor printed, nor hashed."""
    file = tmp_path / "a.json"
    file.write_text(text)
    with pytest.raises(untrusted.Refused, match="half of a UTF-16 pair"):
        untrusted.read_json(file, limit=100)
    for whole in (r"\ud83d\ude00", r"\\ud800"):
        file.write_text(f'{{"a": "{whole}"}}')
        assert untrusted.read_json(file, limit=100) == {"a": json.loads(f'"{whole}"')}


def test_a_manifest_with_half_of_a_character_is_one_line(tmp_path: Path) -> None:
    rows, made = tmp_path / "a.jsonl", tmp_path / "made"
    rows.write_text('{"text": "row"}\n' * 40)
    prepare.prepare(str(rows), [rows], "", made)
    manifest = made / "data.json"
    about = json.loads(manifest.read_text()) | {"sha256": "\ud800"}
    manifest.write_text(json.dumps(about))
    check_refusal(lambda: corpus.load(str(made)), "data.json", "half of a UTF-16 pair")


@pytest.mark.parametrize("name", ["config", "state", "plan", "result"])
def test_a_gigabyte_of_json(name: str, run: Path) -> None:
    """Real bytes at both ends; the rest need not be written for its size to be seen."""
    file, read = READS[name]
    hollow(run / file, size=10**9, begin=b'{"a": "')
    check_refusal(lambda: read(run), Path(file).name, "too large")


def test_a_gigabyte_of_log(run: Path) -> None:
    hollow(run / "log.jsonl", size=10**9)
    check_refusal(
        lambda: list(runlog.rows(run / "log.jsonl")), "log.jsonl", "too large", "move it elsewhere"
    )


def test_a_log_of_one_long_line_takes_no_memory(run: Path) -> None:
    with (run / "log.jsonl").open("ab") as file:
        file.write(b'{"kind": "' + b"x" * 100_000_000)
    with limit(room=20 << 20, seconds=10):
        assert [row["step"] for row in runlog.rows(run / "log.jsonl")] == [1]


def test_why_a_file_was_not_read_is_said_without_its_name() -> None:
    """Also of an error that no system call gave, which has no `strerror`."""
    assert why(FileNotFoundError(2, "No such file", "a.json")) == "No such file"
    assert why(OSError("truncated")) == "truncated"
    assert why(untrusted.Refused("no row")) == "no row"


# --- what is no file, or is another one


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("kind", ["folder", "fifo", "device", "socket name"])
def test_what_is_no_file(name: str, kind: str, run: Path) -> None:
    file, read = READS[name]
    path = run / file
    path.unlink()
    match kind:
        case "folder":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case _:
            path.symlink_to(path.name)  # a loop
    check_refusal(lambda: read(run))


@pytest.mark.parametrize("name", INSIDE)
def test_a_link_out_of_the_run(name: str, run: Path, tmp_path: Path) -> None:
    """To a file that is in order, so that the link alone is wrong."""
    file, read = READS[name]
    read(run)
    (run / file).rename(tmp_path / "elsewhere")
    (run / file).symlink_to(tmp_path / "elsewhere")
    check_refusal(lambda: read(run), "link")


@pytest.mark.parametrize("name", directory.OWNED)
def test_a_run_with_a_link_is_not_read(name: str, run: Path, tmp_path: Path) -> None:
    (run / "init").mkdir()  # of a run that began with others' weights
    (run / "sample.txt").touch()
    (run / "tensorboard").mkdir()
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
    record = directory.Record(config=CONFIG, framework="jax", data_sha256=64 * "0", details={})
    directory.write_record(run, record)
    with runlog.RunLog(run / "log.jsonl", last_step=0) as log:
        log.write({**TRAIN, "step": 1})
    assert precious.read_text() == "mine"
    assert directory.read_record(run).config == CONFIG


@pytest.mark.parametrize("where", ["../../x", "/etc/passwd", 64 * "0" + "/../../x", "\0", 64 * "g"])
def test_a_checksum_is_no_path(where: str, run: Path) -> None:
    """It names a file in the cache."""
    (run / "config.json").write_text(json.dumps(CONFIG_JSON | {"data_sha256": where}))
    check_refusal(lambda: directory.read_record(run), "config.json")


@pytest.mark.parametrize("data", ["a\0.txt", "\ud800.txt", "/dev/zero", 300 * "x" + ".txt"])
def test_data_that_no_file_can_be_named(data: str) -> None:
    check_refusal(lambda: corpus.load(data), "--data")


# --- what would take memory before the weights say how much


@pytest.mark.parametrize(
    "change",
    [
        {"n_layer": 10**6}, {"n_layer": 2**31}, {"context": 2**31 - 1}, {"d_model": 10**6},
        {"vocab": 10**9}, {"accum": 2**31 - 1}, {"batch_size": 2**31 - 1},
        {"eval_batches": 2**31 - 1}, {"fp32_islands": 10**5 * "head,"},
        {"fp32_islands": 5000 * "*a" + "b"}, {"formats": 10**5 * "head=fp8,"},
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


# --- the checks fail where they should


def test_holes_are_counted(tmp_path: Path) -> None:
    """A file with a hole that a file system may have made is read."""
    hollow(tmp_path / "a", size=untrusted.HOLES // 2, begin=b"a")
    untrusted.open_regular(tmp_path / "a").close()
    with (tmp_path / "a").open("r+b") as file:
        file.seek(untrusted.HOLES * 2)
        file.write(b"b")
    with pytest.raises(untrusted.Refused, match="holes"):
        untrusted.open_regular(tmp_path / "a")


def run_for_ever() -> None:
    while True:  # in Python: a loop in C sees no signal
        pass


def test_refused_can_fail(tmp_path: Path) -> None:
    wrong: list[Callable[[], Any]] = [
        lambda: None, run_for_ever, lambda: np.ones(2**28), lambda: json.loads("{"),
    ]  # fmt: skip
    for read in wrong:
        with pytest.raises(BaseException) as caught:
            check_refusal(read, seconds=1.0)
        assert not isinstance(caught.value, UserError)


def test_untrusted_text_does_not_move_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    """A name in config.json comes into the lines that a resumed run prints."""
    runlog.Display(3, 0).say("a\x1b[2Jb\r\u202ec\nd")
    assert capsys.readouterr().out == "a\\x1b[2Jb\\r\\u202ec\nd\n"
    line = str(UserError("--data \x1b]0;x\x07\n" + 5000 * "a" + "; use other data"))
    assert line.startswith("--data \\x1b]0;x\\x07\\na") and line.endswith("a; use other data")
    assert len(line) == LONGEST + len(" ... ")
