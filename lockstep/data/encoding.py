"""Rows and text -> tokens, masks and ends of documents, a batch at a time."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lockstep.data import chat, records
from lockstep.data.chat import Unusable
from lockstep.data.documents import Documents
from lockstep.data.records import Row
from lockstep.data.tokenizer import Tokenizer
from lockstep.errors import UserError, require

CORES = os.cpu_count() or 1
BATCH = 1 << 22  # characters of rows that are tokenized at a time
EVERY = 20  # documents: one of them is held out


class Text(NamedTuple):
    """The text of a row, before it is tokenized.

    Args:
        text: the text, or that of the messages.
        spans: where in it the targets are that count; None: everywhere.
        end: tokens that follow.
    """

    text: str
    spans: list[tuple[int, int]] | None
    end: list[int]


class Document(NamedTuple):
    """The tokens of a row, or of a piece of a text.

    Args:
        tokens: uint32 (n,).
        counts: bool (n,), whether each counts as a target.
    """

    tokens: np.ndarray
    counts: np.ndarray


class Splits(NamedTuple):
    """A file's tokens, and the rows that were left out."""

    train: np.ndarray | Documents
    val: np.ndarray | Documents
    bad: list[str]  # FILE:NUMBER and why


def encode_text(data: str, file: Path, words: Tokenizer) -> Splits:
    """Tokenize a text, whose last tenth is held out.

    Raises:
        UserError: it cannot be read, or the tokenizer cannot encode it.
    """
    bad: list[str] = []
    pieces = [piece.tokens for piece in _documents(data, file, words, bad, least=CORES)]
    dtype = np.min_scalar_type(words.vocab - 1)
    tokens = np.concatenate([np.zeros(0, np.uint32), *pieces]).astype(dtype)
    end = len(tokens) - len(tokens) // 10
    return Splits(tokens[:end], tokens[end:], bad)


def encode_documents(data: str, file: Path, words: Tokenizer, rows: str) -> Splits:
    """Tokenize a file of rows; every twentieth is held out, or the last of fewer.

    Args:
        rows: "stream", "pack", "pad" or "auto".

    Raises:
        UserError: it cannot be read, the tokenizer cannot encode it, or no two rows can be used.
    """
    bad: list[str] = []
    documents = list(_documents(data, file, words, bad, least=1))
    remedy = f"only {len(documents)} rows of it can be used" + (f" ({bad[0]})" if bad else "")
    require(len(documents) > 1, "--data", data, f"{remedy}; two or more are needed")
    masked = not all(document.counts.all() for document in documents)
    if rows == "auto":
        rows = "pack" if masked else "stream"
    val = documents[EVERY - 1 :: EVERY]
    if val:
        del documents[EVERY - 1 :: EVERY]
    else:
        val = [documents.pop()]
    dtype = np.min_scalar_type(words.vocab - 1)
    train, held_out = (_join(split, masked, rows, dtype) for split in (documents, val))
    return Splits(train, held_out, bad)


def _join(
    documents: list[Document], masked: bool, rows: str, dtype: np.dtype
) -> np.ndarray | Documents:
    tokens = np.concatenate([document.tokens for document in documents]).astype(dtype)
    counts = np.concatenate([document.counts for document in documents]) if masked else None
    if rows == "stream":
        return tokens if counts is None else Documents(tokens, counts)
    ends = np.cumsum([len(document.tokens) for document in documents])
    return Documents(tokens, counts, ends, alone=rows == "pad")


def _documents(
    data: str, file: Path, words: Tokenizer, bad: list[str], *, least: int
) -> Iterator[Document]:
    """Tokenize a file in batches of BATCH bytes, and of `least` rows: a text's piece is large."""
    batch, size = list[Row](), 0
    for row in records.read(data, file):
        batch.append(row)
        size += row.size
        if size >= BATCH and len(batch) >= least:
            yield from encode_rows(batch, words, bad)
            batch, size = [], 0
    yield from encode_rows(batch, words, bad)


def encode_rows(rows: Sequence[Row], words: Tokenizer, bad: list[str]) -> Iterator[Document]:
    """Tokenize rows; those that cannot be used are named in `bad`, and left out.

    Raises:
        UserError: the tokenizer cannot encode a text.
    """
    texts: list[tuple[str, Text]] = []
    for row in rows:
        try:
            texts.append((row.place, find_text(row.content, words)))
        except Unusable as why:
            bad.append(f"{row.place} {why}")
    try:
        encoded = words.encode([each.text for _, each in texts])
    except ValueError as why:
        problem = f"tokenizer.json: cannot encode a text ({str(why)[:200]})"
        raise UserError(f"{problem}; use another --tokenizer, or other data") from None
    for (place, (_, spans, end)), found in zip(texts, encoded, strict=True):
        counts = np.full(len(found.tokens) + len(end), spans is None)
        for start, stop in spans or []:
            counts |= (found.starts >= start) & (found.stops <= stop) & (found.starts < found.stops)
        if len(counts) < 2:
            bad.append(f"{place} has less than two tokens")
        else:
            yield Document(np.concatenate([found.tokens, np.array(end, np.uint32)]), counts)


def find_text(content: Any, words: Tokenizer) -> Text:
    """Find a row's content: a text, all of which counts, or messages.

    Raises:
        Unusable: the row is neither, or no valid Unicode.
    """
    if isinstance(content, Unusable):
        raise content
    if isinstance(content, str):
        found = Text(content, None, [])
    elif not isinstance(content, dict):
        raise Unusable("is no object")
    elif "messages" in content:  # which end themselves
        found = Text(*chat.find_spans(content["messages"], words.render), [])
    elif type(content.get("text")) is str:
        found = Text(content["text"], None, words.end)
    else:
        raise Unusable("has neither text nor messages")
    try:
        found.text.encode()
    except UnicodeEncodeError:  # half of a UTF-16 pair, which JSON can write
        raise Unusable("is no valid Unicode") from None
    return found
