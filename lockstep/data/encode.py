"""A part's rows -> tokens, and which of them count; a row that is none is named and left out."""

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lockstep.data import chat, records, tokenizer
from lockstep.data.chat import Unusable
from lockstep.data.records import Part
from lockstep.data.tokenizer import Tokenizer
from lockstep.process import end_after


class Outline(NamedTuple):
    """Of a part. A document is a row; the text of a .txt file's part is one, too."""

    sizes: np.ndarray  # uint64 (documents,), tokens of each
    rows: int  # lines of the part, empty ones too
    masked: bool  # whether any document has tokens that do not count
    bad: list[tuple[int, str]]  # row of the part, from 1, and what is wrong with it


class Encoded(NamedTuple):
    tokens: np.ndarray  # (n,)
    counts: np.ndarray  # uint8 (n,), whether each counts as a target
    outline: Outline


def document(row: Any, words: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, and which count: all of a text, an assistant's of messages.

    Raises:
        Unusable: the row is neither.
    """
    if isinstance(row, str):
        return _encode(row, words, None, [])
    if not isinstance(row, dict):
        raise Unusable("is no object")
    if "messages" in row:
        text, spans = chat.spans(row["messages"], words.render)
        return _encode(text, words, spans, [])
    if type(row.get("text")) is not str:
        raise Unusable("has neither text nor messages")
    return _encode(row["text"], words, None, words.end)


def _encode(
    text: str, words: Tokenizer, spans: list[tuple[int, int]] | None, end: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    try:
        found = words.encode(text)
    except UnicodeEncodeError:  # half of a UTF-16 pair, which JSON can write
        raise Unusable("is no valid Unicode") from None
    counts = np.full(len(found.tokens), spans is None)
    for start, stop in spans or []:
        counts |= (found.starts >= start) & (found.stops <= stop) & (found.starts < found.stops)
    tokens = np.concatenate([found.tokens, np.array(end, np.uint32)])
    counts = np.concatenate([counts, np.full(len(end), spans is None)])
    if len(tokens) < 2:
        raise Unusable("has less than two tokens")
    return tokens, counts


def encode(part: Part, words: Tokenizer) -> Encoded:
    documents, bad, number = [], [], 0
    for number, row in enumerate(records.read(part), 1):
        if row is None:
            continue
        try:
            if isinstance(row, Unusable):
                raise row
            documents.append(document(row, words))
        except Unusable as why:
            bad.append((number, str(why)))
    tokens = [np.zeros(0, np.uint32), *(tokens for tokens, _ in documents)]
    counts = [np.zeros(0, bool), *(counts for _, counts in documents)]
    sizes = np.array([len(each) for each, _ in documents], np.uint64)
    masked = not all(each.all() for each in counts)
    return Encoded(
        np.concatenate(tokens).astype(dtype(words.vocab)),
        np.concatenate(counts).astype(np.uint8),
        Outline(sizes, number, masked, bad),
    )


def dtype(vocab: int) -> str:
    return "<u1" if vocab <= 1 << 8 else "<u2" if vocab <= 1 << 16 else "<u4"


def start_worker(folder: str) -> None:
    """Of a pool: its tokenizer is loaded once."""
    global _words
    if parent := multiprocessing.parent_process():
        end_after(parent.join)  # a killed process stops no pool
    _words = tokenizer.load(folder)


def encode_to(part: Part, file: Path) -> None:
    """Into an .npz file, whole or not at all."""
    tokens, counts, (sizes, *about) = encode(part, _words)
    partial = file.with_suffix(f".{os.getpid()}.tmp")
    with partial.open("wb") as stream:
        text = np.frombuffer(json.dumps(about).encode(), np.uint8)
        np.savez(stream, tokens=tokens, counts=counts, sizes=sizes, about=text)
    os.replace(partial, file)


def load_outline(file: Path) -> Outline:
    with np.load(file, allow_pickle=False) as arrays:
        rows, masked, bad = json.loads(bytes(arrays["about"]))
        return Outline(arrays["sizes"], rows, masked, [(number, why) for number, why in bad])


def load_part(file: Path) -> Encoded:
    with np.load(file, allow_pickle=False) as arrays:
        return Encoded(arrays["tokens"], arrays["counts"], load_outline(file))


_words: Tokenizer
