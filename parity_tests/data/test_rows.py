"""Rows of text and messages -> tokens, masks and documents."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.data import corpus, encoding, records, tokenizer
from lockstep.data.chat import find_spans
from lockstep.data.documents import Documents
from lockstep.errors import UserError
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


def test_a_context_holds_a_target_that_counts(tmp_path: Path) -> None:
    loaded = corpus.load(str(write_rows(tmp_path / "a.jsonl", chat())))
    corpus.check(loaded, 256, 200)
    with pytest.raises(UserError, match="--context 20: no target counts"):
        corpus.check(loaded, 256, 20)


def test_text_rows_are_one_stream_unless_asked(tmp_path: Path) -> None:
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
    monkeypatch.setattr(encoding, "BATCH", 600)
    monkeypatch.setattr(records, "LONGEST", 400)
    lines: list[Any] = [each for pair in zip(chat(len(bad)), bad) for each in pair]
    file = write_rows(tmp_path / "a.jsonl", lines)
    splits = encoding.encode_documents("a", file, tokenizer.load(str(words) * named), "pad")
    assert isinstance(splits.train, Documents) and isinstance(splits.val, Documents)
    ends = [split.ends for split in (splits.train, splits.val)]
    assert [0 if each is None else len(each) for each in ends] == [len(bad) - 1, 1]
    found = dict(line.split(" ", 1) for line in splits.bad)
    assert list(found) == [f"a.jsonl:{2 * n}" for n in (1, 2, 4, 5, 6, 7, 8, 9)]
    for line, said in ((2, "invalid JSON"), (4, "neither text nor messages"),
                       (10, "no valid Unicode"), (18, "longer than")):  # fmt: skip
        assert said in found[f"a.jsonl:{line}"]


def test_batches_of_rows_change_nothing(
    tmp_path: Path, words: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(write_rows(tmp_path / "a.jsonl", chat(60)))
    whole = corpus.load(file, str(words))
    monkeypatch.setattr(encoding, "BATCH", 4000)
    again = corpus.load(file, str(words))
    for split in ("train", "val"):
        for name in ("tokens", "counts", "ends"):
            a, b = (getattr(getattr(loaded, split), name) for loaded in (whole, again))
            assert np.array_equal(a, b)


def test_pieces_of_a_text_are_cut_at_ends_of_lines(
    tmp_path: Path, words: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_rows(tmp_path / "a.txt", chat(60))
    monkeypatch.setattr(encoding, "BATCH", 4000)
    monkeypatch.setattr(records, "PIECE", 2000)
    assert len(list(records.read("a", file))) > 4
    loaded = corpus.load(str(file), str(words))
    tokens = np.concatenate([loaded.train, loaded.val])
    assert tokenizer.load(str(words)).decode(tokens) == file.read_text()
    assert len(loaded.val) == len(tokens) // 10 and tokens.dtype == np.uint16


@pytest.mark.parametrize(("count", "held_out"), [(2, [1]), (19, [18]), (20, [19]), (41, [19, 39])])
def test_every_twentieth_document_is_held_out(
    count: int, held_out: list[int], tmp_path: Path
) -> None:
    """Fewer than twenty documents hold out the last."""
    rows = [{"text": f"row {n}"} for n in range(count)]
    loaded = corpus.load(str(write_rows(tmp_path / "a.jsonl", rows)))
    texts = [f"row {n}\0".encode() for n in range(count)]
    assert bytes(loaded.val) == b"".join(texts[n] for n in held_out)
    assert bytes(loaded.train) == b"".join(texts[n] for n in range(count) if n not in held_out)


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_suffix_may_be_in_capitals(tmp_path: Path, words: Path, kind: str) -> None:
    """Rows stay rows."""
    lower = write_rows(tmp_path / f"a.{kind}", chat())
    upper = Path(write(tmp_path / f"A.{kind.upper()}", lower.read_bytes()))
    small, large = (corpus.load(str(file), str(words)) for file in (lower, upper))
    assert isinstance(large.train, Documents) == (kind == "jsonl")
    assert small.sizes == large.sizes


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


def test_a_tokenizer_s_template_and_masks(tmp_path: Path, words: Path) -> None:
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
