"""Data: the tokens of a window and of a packed row, and of documents, by hand."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers.utils import chat_template_utils

from lockstep.data import batches, chat, corpus
from lockstep.data.batch import Batch
from lockstep.data.documents import Documents
from parity_tests.pair import toy

CONTEXT, ROWS, LENGTH = 5, 3, 997
TEXT = np.arange(LENGTH, dtype=np.uint16)  # a token says where it stands
STEPS = (0, 1, 2, 999, 1000, 1001, 65_536, 123_456)
# Another release that draws other windows cannot go on with a run.
PINNED = {(0, "train", 0): [731, 338, 281], (0, "train", 1000): [808, 551, 954]}


def starts_by_hand(seed: int, split: str, step: int, micro_step: int, positions: int) -> list[int]:
    """The first token of each row: Philox4x64-10 of the seed, the split and the place."""
    bits = np.random.Philox(
        key=[seed, ("train", "val").index(split)], counter=[0, 0, micro_step, step]
    )
    return [int(number) % positions for number in bits.random_raw(ROWS)]


def draw(seed: int, split: str, step: int, count: int, own: np.ndarray | None = None) -> Batch:
    config = toy(context=CONTEXT, batch_size=ROWS, vocab=LENGTH, seed=seed, accum=count,
                 eval_batches=count)  # fmt: skip
    if split == "val":
        return batches.validation(config, TEXT, own)
    return batches.of_step(config, TEXT, step, own)


def test_windows_match_philox() -> None:
    """Checks both splits, three seeds, steps beyond 1000 and 2**16, and twelve micro-batches."""
    places = [("train", step) for step in STEPS] + [("val", 0)]
    for seed in (0, 1, 7):
        for split, step in places:
            window = draw(seed, split, step, 12)
            every = range(12)
            hand = [starts_by_hand(seed, split, step, n, LENGTH - CONTEXT) for n in every]
            expected = np.array(hand)[..., None] + np.arange(CONTEXT)
            assert np.array_equal(window.tokens, expected), (seed, split, step)
            assert np.array_equal(window.targets, expected + 1), (seed, split, step)
            assert window.counts is None and window.segments is None
            assert hand[0] == PINNED.get((seed, split, step), hand[0])


def test_own_rows_are_read_alone() -> None:
    """A process gets its own rows in their places, and zeros for the others."""
    whole, own = draw(0, "train", 3, 2), np.array([0, 2])
    part = draw(0, "train", 3, 2, own)
    assert np.array_equal(part.tokens[:, own], whole.tokens[:, own])
    assert np.array_equal(part.targets[:, own], whole.targets[:, own])
    assert not part.tokens[:, 1].any() and not part.targets[:, 1].any()


# Five documents of 4, 5, 3, 18 and 3 tokens, so of 3, 4, 2, 17 and 2 targets.
STREAM = np.arange(1, 34, dtype=np.uint16)
ENDS = np.array([4, 9, 12, 30, 33], np.uint64)
COUNTS = (STREAM % 3 > 0).astype(np.uint8)  # a multiple of 3 is no target
# The first document -> tokens and segments of a row of 9.
PACKED = {
    0: ([1, 2, 3, 5, 6, 7, 8, 10, 11], [1, 1, 1, 2, 2, 2, 2, 3, 3]),  # the third just fits
    1: ([5, 6, 7, 8, 10, 11, 0, 0, 0], [1, 1, 1, 1, 2, 2, 0, 0, 0]),  # the fourth does not
    2: ([10, 11] + 7 * [0], [1, 1] + 7 * [0]),
    3: ([13, 14, 15, 16, 17, 18, 19, 20, 21], 9 * [1]),  # cut
    4: ([31, 32, 1, 2, 3, 5, 6, 7, 8], [1, 1, 2, 2, 2, 3, 3, 3, 3]),  # after the last, the first
}


def test_packed_rows() -> None:
    """Whole documents, several a row; each target is the next token of its document."""
    numbers = np.array([0, 1, 2, 3, 4, 5 * 10**9 + 1], np.uint64)
    rows = Documents(STREAM, COUNTS, ENDS).draw(numbers, 9)
    tokens, segments = (np.array([PACKED[int(n) % 5][i] for n in numbers]) for i in (0, 1))
    counts = (segments > 0) & ((tokens + 1) % 3 > 0)
    for found, expected in zip(rows, (tokens, np.where(counts, tokens + 1, 0), counts, segments)):
        assert np.array_equal(found, expected)


def test_padded_rows() -> None:
    """One document a row; without a mask each token of it counts."""
    rows = Documents(STREAM, None, ENDS, alone=True).draw(np.arange(5, dtype=np.uint64), 9)
    for row, (tokens, segments) in PACKED.items():
        first = np.array(segments) == 1
        expected = np.where(first, tokens, 0)
        assert np.array_equal(rows.tokens[row], expected)
        assert np.array_equal(rows.targets[row], np.where(first, expected + 1, 0))
        assert np.array_equal(rows.counts[row], first) and np.array_equal(rows.segments[row], first)


def test_masked_stream() -> None:
    """Rows begin anywhere; only what the mask counts is a target, and there are no segments."""
    starts = np.array([0, 23, 24 + 7], np.uint64)
    rows = Documents(STREAM, COUNTS).draw(starts, 9)
    tokens = 1 + np.array([0, 23, 7])[:, None] + np.arange(9)
    counts = (tokens + 1) % 3 > 0
    assert np.array_equal(rows.tokens, tokens) and rows.segments is None
    assert np.array_equal(rows.counts, counts)
    assert np.array_equal(rows.targets, np.where(counts, tokens + 1, 0))


def test_documents_are_drawn() -> None:
    """The row of a step begins with the document that its number names."""
    config = toy(context=9, batch_size=ROWS, vocab=64, accum=2)
    window = batches.of_step(config, Documents(STREAM, COUNTS, ENDS), 1234)
    for n in range(2):
        firsts = starts_by_hand(0, "train", 1234, n, len(ENDS))
        assert window.tokens[n].tolist() == [PACKED[first][0] for first in firsts]


# --- tokens made ahead

PROMPT, ANSWER = "<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n", "yes<|im_end|>\n"
CHAT = {"messages": [{"role": "user", "content": "no"}, {"role": "assistant", "content": "yes"}]}
PLAIN = {"text": "plain"}


def load_rows(folder: Path, rows: list[dict[str, Any]], tokenizer: str = "") -> Any:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_CACHE", str(folder / "cache"))
        return corpus.load(str(file), tokenizer)


@pytest.mark.parametrize("chat_in", ["val", "train"])
def test_masks_of_chats(chat_in: str, folder: Path) -> None:
    """Checks that among rows of text, held out or not, a chat's prompt alone does not count."""
    place = {"train": 2, "val": 19}[chat_in]  # the twentieth row is held out
    loaded = load_rows(folder, [CHAT if i == place else PLAIN for i in range(20)])
    chat = (PROMPT + ANSWER).encode(), [0] * len(PROMPT) + [1] * len(ANSWER)
    plain = b"plain\0", [1] * 6  # a text ends with byte 0
    for split, rows in (("train", range(19)), ("val", range(19, 20))):
        documents, counts = zip(*(chat if i == place else plain for i in rows))
        found = getattr(loaded, split)
        assert isinstance(found, Documents)  # and so masked
        assert np.asarray(found.tokens).tobytes() == b"".join(documents)
        assert np.asarray(found.counts).tolist() == [*itertools.chain(*counts)]
        assert np.asarray(found.ends).tolist() == [*itertools.accumulate(map(len, documents))]


def test_tokenizer_settings_are_ignored(folder: Path) -> None:
    """A document is its words' own numbers and the end: whatever the file says of lengths, and of
    tokens around a text, is for others."""
    inner = Tokenizer(WordLevel({"a": 0, "b": 1, "c": 2, "<end>": 3, "<pad>": 4, "<s>": 5}))
    inner.pre_tokenizer = WhitespaceSplit()
    inner.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 5)])
    inner.enable_truncation(3)
    inner.enable_padding(pad_id=4, pad_token="<pad>", length=8)
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    texts = {"a b": [0, 1, 3], "a b c a b": [0, 1, 2, 0, 1, 3]}
    loaded = load_rows(folder, [{"text": text} for text in texts], str(folder))
    found = [np.asarray(split[:]).tolist() for split in (loaded.train, loaded.val)]
    assert found == [*texts.values()] and loaded.vocab == 6


def test_tokens_across_an_edge_are_no_targets(folder: Path) -> None:
    """A token that is in part an answer and in part a prompt is no target: here `ay`, whose `a` is
    the answer's header, and the line's end that is one with the next prompt's `u`."""
    letters = ["u", "n", "o", "\n", "a", "y", "e", "s", "k", "ay", "\nu"]
    numbers = {letter: number for number, letter in enumerate(letters)}
    inner = Tokenizer(BPE(numbers, [("a", "y"), ("\n", "u")]))
    inner.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role[0] + m.content + '\n' }}{% endfor %}"
    template += "{% if add_generation_prompt %}a{% endif %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    turns = [("user", "no"), ("assistant", "yes"), ("user", "ok"), ("assistant", "y")]
    row = {"messages": [{"role": role, "content": content} for role, content in turns]}
    loaded = load_rows(folder, [row, row], str(folder))
    tokens = ["u", "n", "o", "\n", "ay", "e", "s", "\nu", "o", "k", "\n", "ay", "\n"]
    for split in (loaded.train, loaded.val):
        assert [letters[token] for token in split.tokens] == tokens
        assert np.flatnonzero(split.counts).tolist() == [5, 6, 12]


TEMPLATES = {
    "indented": """{%- for m in messages %}
    {% if m.role == 'user' %}
[INST] {{ m.content }} [/INST]
    {% else %}
{{ bos_token }}{{ m.content }}{{ eos_token }}
    {% endif %}
{% endfor %}
    {% if add_generation_prompt %}
<think>
    {% endif %}
""",
    "json": "{% for m in messages %}{{ m | tojson }} {{ m | tojson(indent=2) }}{% endfor %}",
    "loops": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}"
             "{{ m.content }}{% break %}{% endfor %}",
    "tools": "{% if tools is not none %}Tools: {{ tools }}{% endif %}"
             "{% if documents is not none %}Documents{% endif %}{{ messages[0].content }}",
    "generation": "{% for m in messages %}{% set said = 'no' %}\n{% generation %}\n"
                  "{% set said = m.content %}{{ said }}{% endgeneration %}\n{{ said }}{% endfor %}",
}  # fmt: skip
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_match_transformers(name: str) -> None:
    """A chat is written as transformers writes it: blanks and lines around blocks, JSON, loops that
    end early, tools that nobody gave, and the mark around what an assistant says."""
    render: Any = chat_template_utils.render_jinja_template
    said: chat.Messages = [
        {"role": "user", "content": "  Où? <b>\n"},
        {"role": "assistant", "content": "'là' & \"ici\""},
        {"role": "user", "content": "ok"},
    ]
    for count, header in itertools.product((1, 2, 3), (False, True)):
        how = {"chat_template": TEMPLATES[name], "add_generation_prompt": header, **SPECIAL}
        (theirs,), _ = render([said[:count]], **how)
        assert chat.compile_template(TEMPLATES[name], SPECIAL)(said[:count], header) == theirs
