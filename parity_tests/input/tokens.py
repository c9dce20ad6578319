"""What users' data are, for the fuzzers: a tokenizer, parquet, a .bin with llm.c's header."""

import functools
import io
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import tokenizers
from hypothesis import strategies as st
from pyarrow.parquet import write_table

from lockstep.data import corpus, records
from lockstep.data.chat import Unusable
from lockstep.data.corpus import Corpus
from lockstep.data.tokenizer import FromFile, Tokenizer
from parity_tests.input.mutations import Files, damage, files

TURNS = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4 \u00fc"}]
TEXT = "to be or not \u00fc"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] | trim }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
ABOUT = {"eos_token": {"content": "</s>"}, "bos_token": None, "chat_template": TEMPLATE}
HEADER = [20240520, 1, 40]  # of llm.c's tokens: magic, version, how many


@functools.cache
def tokenizer_json() -> dict[str, Any]:
    words = {"t": 0, "o": 1, "to": 2, "b": 3, "e": 4, "</s>": 5, "<unk>": 6}
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=words, merges=[("t", "o")], unk_token="<unk>")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens([tokenizers.AddedToken("</s>")])
    return json.loads(made.to_str())


@st.composite
def folders(draw: st.DrawFn) -> Files:
    made = {"tokenizer.json": tokenizer_json(), "tokenizer_config.json": ABOUT}
    name = draw(st.sampled_from(sorted(made)))
    given = {each: json.dumps(content).encode() for each, content in made.items()}
    return {**given, name: draw(files(made[name]))}


def read_tokenizer(folder: Path) -> Tokenizer:
    """And as data are made: a text, a chat, and back again."""
    found = FromFile(folder)
    with suppress(ValueError):  # by which `encode` says that it cannot
        (encoded,) = found.encode([TEXT])
        assert len(encoded.tokens) == len(encoded.starts) == len(encoded.stops)
        found.decode(encoded.tokens)
    with suppress(Unusable):
        found.render(TURNS, True)
    return found


@functools.cache
def parquet() -> bytes:
    stream = io.BytesIO()
    rows = {"text": [TEXT, None] * 20, "messages": [None, TURNS] * 20}
    write_table(pyarrow.table(rows), stream, row_group_size=10)
    return stream.getvalue()


def parquets() -> st.SearchStrategy[bytes]:
    good = st.deferred(lambda: st.just(parquet()))
    return good | st.deferred(lambda: damage(parquet()))


def read_parquet(folder: Path) -> list[Any]:
    """Its rows, each or why it is none, as `corpus.load` encodes them."""
    file = folder / "a.parquet"
    found = [row.content for row in records.read(str(file), [file])]
    assert all(type(row) in (dict, Unusable) for row in found)
    return found


def bins() -> st.SearchStrategy[bytes]:
    def whole(header: list[int], count: int) -> bytes:
        first = np.array([*header, *[0] * 253], "<i4").tobytes()
        return first + np.arange(count, dtype="<u2").tobytes()

    number = st.sampled_from([0, -1, 2**31 - 1, 20240801, 39, 41, 7, 2])
    changed = st.tuples(st.integers(0, 2), number).map(
        lambda change: whole([change[1] if i == change[0] else x for i, x in enumerate(HEADER)], 40)
    )
    good = whole(HEADER, 40)
    return st.just(good) | changed | damage(good)


def read_bin(folder: Path) -> Corpus:
    data = corpus.load(str(folder / "a.bin"))
    corpus.check(data, 65536, 2)
    return data
