"""Rows of text and messages -> tokens and masks: prepared, and read back."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.cli import commands, trainers
from lockstep.data import corpus, prepare, prepared, records, tokenizer
from lockstep.data.chat import find_spans
from lockstep.errors import UserError
from lockstep.process import ROOT
from parity_tests.data.corpora import write

USER = {"role": "user", "content": "2+2? ü é"}
ASSISTANT = {"role": "assistant", "content": "It is 4 ü é."}


def chat(count: int = 25, **more: Any) -> list[dict[str, Any]]:
    numbered = [{"role": "user", "content": f"Number {n}?"} for n in range(count)]
    return [{"messages": [each, ASSISTANT, USER, ASSISTANT], **more} for each in numbered]


def write_rows(path: Path, lines: list[Any]) -> Path:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    write(path, text.encode())
    return path


def made(file: Path, out: Path) -> prepared.Manifest:
    return prepare.prepare(str(file), [file], "", out)


def test_a_context_holds_a_target_that_counts(tmp_path: Path, cache: Path) -> None:
    loaded = corpus.load(str(write_rows(tmp_path / "a.jsonl", chat())))
    corpus.check(loaded, 256, 200)
    with pytest.raises(UserError, match="--context 20: no target counts"):
        corpus.check(loaded, 256, 20)


def test_text_rows_are_one_stream_unless_asked(tmp_path: Path, cache: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", [{"text": f"row {n}"} for n in range(40)])
    stream, packed = (corpus.load(str(file), rows=kind) for kind in ("auto", "pack"))
    assert bytes(stream.train[:12]) == b"row 0\0row 1\0"
    assert packed.train.counts is None and len(packed.train.ends) == 38
    held_out = bytes(stream.val)
    assert held_out == b"row 19\0row 39\0"


@pytest.mark.parametrize("named", [False, True], ids=["bytes", "tokenizer"])
def test_bad_rows_are_named_and_left_out(
    named: bool, tmp_path: Path, words: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With their line in the file, whichever batch they stand in."""
    bad = ["not json", '{"text": 3}', "", '{"messages": [{"role": "user"}]}', '{"text": "\\ud800"}',
           '{"messages": [{"role": "user", "content": "x"}]}', "[1]", '{"text": "a", "text": "b"}',
           "x" * 500]  # fmt: skip
    monkeypatch.setattr(prepare, "BATCH", 600)
    monkeypatch.setattr(records, "LONGEST", 400)
    lines: list[Any] = [each for pair in zip(chat(len(bad)), bad) for each in pair]
    file = write_rows(tmp_path / "a.jsonl", lines)
    about = prepare.prepare("a", [file], str(words) * named, tmp_path / "out")
    assert about.train_documents + about.val_documents == len(bad)
    found = dict(line.split(" ", 1) for line in about.named)
    assert list(found) == [f"a.jsonl:{2 * n}" for n in (1, 2, 4, 5, 6, 7, 8, 9)]
    assert about.bad == 8
    for line, said in ((2, "invalid JSON"), (4, "neither text nor messages"),
                       (10, "no valid Unicode"), (18, "longer than")):  # fmt: skip
        assert said in found[f"a.jsonl:{line}"]


@pytest.mark.parametrize("kind", ["jsonl", "txt"])
def test_batches_change_nothing(
    kind: str, tmp_path: Path, words: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text's pieces are cut at ends of lines."""
    file = write_rows(tmp_path / f"a.{kind}", chat(60))
    whole = prepare.prepare("a", [file], str(words), tmp_path / "whole")
    monkeypatch.setattr(prepare, "BATCH", 4000)
    monkeypatch.setattr(records, "PIECE", 2000)
    assert len(list(records.read("a", [file]))) > 4
    again = prepare.prepare("a", [file], str(words), tmp_path / "again", 2)
    if kind == "jsonl":
        assert again.sha256 == whole.sha256
    decode, texts = tokenizer.load(str(words)).decode, []
    for out in ("whole", "again"):
        files = [tmp_path / out / f"{split}.bin" for split in prepared.SPLITS]
        texts.append(decode(np.concatenate([np.fromfile(each, whole.dtype) for each in files])))
    assert texts[0] == texts[1]


def test_what_is_there_is_taken(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", chat())
    about = made(file, tmp_path / "out")
    written = (tmp_path / "out" / "train.bin").stat().st_mtime_ns
    assert made(file, tmp_path / "out") == about
    assert (tmp_path / "out" / "train.bin").stat().st_mtime_ns == written
    os.utime(file, ns=(1, 1))
    with pytest.raises(UserError, match="--out .*out: holds other tokens"):
        made(file, tmp_path / "out")


def test_what_is_stopped_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    file = write_rows(tmp_path / "a.jsonl", chat())
    monkeypatch.setattr(prepared.Writer, "finish", stop)
    with pytest.raises(KeyboardInterrupt):
        made(file, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize(("count", "held_out"), [(2, [1]), (19, [18]), (20, [19]), (41, [19, 39])])
def test_every_twentieth_document_is_held_out(
    count: int, held_out: list[int], tmp_path: Path
) -> None:
    """Fewer than twenty documents hold out the last."""
    rows = [{"text": f"row {n}"} for n in range(count)]
    made(write_rows(tmp_path / "a.jsonl", rows), tmp_path / "out")
    splits = [(tmp_path / "out" / f"{split}.bin").read_bytes() for split in ("train", "val")]
    texts = [f"row {n}\0".encode() for n in range(count)]
    assert splits[1] == b"".join(texts[n] for n in held_out)
    assert splits[0] == b"".join(texts[n] for n in range(count) if n not in held_out)


def test_a_user_without_a_home_needs_a_place_for_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    file = write_rows(tmp_path / "a.jsonl", chat())
    monkeypatch.delenv("LOCKSTEP_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    corpus.load(str(file))
    assert list((tmp_path / "xdg" / "lockstep").glob("data-*/data.json"))
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(UserError, match=f"^--data {file}: .*no home; set LOCKSTEP_CACHE"):
        corpus.load(str(file))


def test_two_processes_at_once_make_the_same(tmp_path: Path) -> None:
    """Two runs, or the ranks of a mesh, make the same tokens at once."""
    file = write_rows(tmp_path / "a.jsonl", chat())
    words = [sys.executable, "-m", "lockstep", "data", str(file)]
    at_once = [subprocess.Popen(words, stdout=subprocess.DEVNULL, cwd=ROOT) for _ in range(2)]
    assert [each.wait(60) for each in at_once] == [0, 0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "a.jsonl.tokens"]
    made(file, tmp_path / "alone")
    both, alone = (corpus.load(str(each)) for each in (f"{file}.tokens", tmp_path / "alone"))
    assert both.sizes == alone.sizes and bytes(both.train.tokens) == bytes(alone.train.tokens)


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_a_suffix_may_be_in_capitals(tmp_path: Path, cache: Path, words: Path, kind: str) -> None:
    """Its file is no text for that: rows stay rows, by the file, the folder and the command."""
    lower = tmp_path / "lower" / f"a.{kind}"
    write_rows(lower, chat())
    upper = tmp_path / "upper" / f"A.{kind.upper()}"
    write(upper, lower.read_bytes())
    sizes = {
        corpus.load(str(data), str(words)).sizes
        for data in (lower, upper, lower.parent, upper.parent)
    }
    assert len(sizes) == 1
    assert commands.main(["data", str(upper)]) == 0
    assert prepared.read_manifest(tmp_path / "upper" / f"A.{kind.upper()}.tokens").masked == (
        kind != "txt"
    )


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a small byte-level BPE, and a template with turns of its own."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("words")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    made.train_from_iterator([json.dumps(row) for row in chat()], trainer)
    made.save(str(folder / "tokenizer.json"))
    about = {
        "eos_token": {"content": "</s>"},
        "bos_token": "<s>",
        "chat_template": "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}"
        "{{ raise_exception('no tools') }}{% endif %}<s>{{ m.role }}: {{ m['content'] }}</s>\n"
        "{% endfor %}{% if add_generation_prompt %}<s>assistant: {% endif %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    yield folder


def test_a_tokenizer_s_template_and_masks(tmp_path: Path, cache: Path, words: Path) -> None:
    lines = [*chat(), {"messages": [{"role": "tool", "content": "x"}, ASSISTANT]}]
    file = write_rows(tmp_path / "a.jsonl", lines)
    loaded = corpus.load(str(file), tokenizer=str(words))
    split, inner = loaded.train, tokenizer.load(str(words))
    document = slice(0, int(split.ends[0]))
    tokens, counts = np.asarray(split.tokens[document]), np.asarray(split.counts[document])
    text = "<s>" + "".join(f"<s>{m['role']}: {m['content']}</s>\n" for m in lines[0]["messages"])
    assert inner.decode(tokens) == text
    assert inner.decode(tokens[counts == 1]) == 2 * f"{ASSISTANT['content']}</s>\n"
    assert loaded.vocab == inner.vocab > 256 and split.tokens.dtype == np.uint16
    assert "1 rows left out: a.jsonl:26 the chat template refuses it: no tools" in loaded.source


@pytest.mark.parametrize(("data", "inside"), [(".", ""), ("..", "b"), ("../a", "")])
def test_tokens_lie_beside_the_folder_that_they_are_made_of(
    data: str, inside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is given by no name of its own."""
    write_rows(tmp_path / "a" / "a.jsonl", chat())
    (tmp_path / "a" / "b").mkdir()
    monkeypatch.chdir(tmp_path / "a" / inside)
    assert commands.main(["data", data]) == 0
    assert prepared.read_manifest(tmp_path / "a.tokens").masked


def test_a_trainer_takes_no_other_tokenizer_than_that_of_the_tokens(
    tmp_path: Path, cache: Path, words: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run would keep it, and what it writes would be decoded by it."""
    file, out = write_rows(tmp_path / "a.jsonl", chat()), tmp_path / "a.tokens"
    made(file, out)
    small = "--model tiny --n-layer 1 --d-model 8 --n-head 1 --context 99 --steps 1 --warmup 0"
    given = [*small.split(), "--vocab", "300", "--out", str(tmp_path / "run"), "--data", str(out)]
    assert trainers.train("torch", [*given, "--tokenizer", str(words)]) == 2
    assert f"--tokenizer {words}: is not that of {out}; name it" in capsys.readouterr().err


def test_the_command_names_what_to_train_with(
    tmp_path: Path, words: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_rows(tmp_path / "a b.jsonl", chat())
    assert commands.main(["data", str(file), "--tokenizer", str(words)]) == 0
    given = shlex.split(capsys.readouterr().out.splitlines()[-1].removeprefix("next: "))
    flags = dict(zip(given[3::2], given[4::2]))
    assert flags == {"--data": f"{file}.tokens", "--tokenizer": str(words), "--vocab": "300"}
    corpus.require_tokenizer(flags["--data"], flags["--tokenizer"])


def test_a_template_that_rewrites_is_refused() -> None:
    """Qwen's strips what an assistant has thought: then no part of the text is a message's."""

    def render(messages: Any, header: bool) -> str:
        return str(len(messages)) + "".join(m["content"] for m in messages)

    with pytest.raises(ValueError, match="does not begin message 2 anew"):
        find_spans([USER, ASSISTANT], render)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"needs the package tokenizers; pip install .*\[data\]"):
        tokenizer.load(str(tmp_path))


def test_the_command_shows_ten_rows_with_their_masks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_rows(tmp_path / "a.jsonl", [*chat(), "bad"])
    assert commands.main(["data", str(file)]) == 0
    said = capsys.readouterr().out.splitlines()
    shown = [line for line in said if " | " in line]
    assert len(shown) == 10 and all(line.count("[[It is 4 ü é.<|im_end|>") == 2 for line in shown)
    assert "1 rows left out:" in said and "  a.jsonl:26 invalid JSON" in "\n".join(said)
    out = tmp_path / "a.jsonl.tokens"
    assert corpus.load(str(out)).train.tokens[:3].tobytes() == b"<|i"
    (out / "train.ends").write_bytes(np.arange(24, 0, -1, dtype="<u8").tobytes())
    with pytest.raises(UserError, match="their ends are not in order"):
        corpus.load(str(out)).train.draw(np.arange(1, 3, dtype=np.uint64), 64)
    (out / "train.counts").write_bytes(b"1")
    with pytest.raises(UserError, match=r"train.counts has 1 items"):
        corpus.load(str(out))
