"""Tokenizes rows and text into a folder, a batch at a time, in threads of `tokenizers`."""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import Progress

from lockstep.data import chat, prepared, records, tokenizer
from lockstep.data.chat import Unusable
from lockstep.data.prepared import Document, Manifest
from lockstep.data.records import Row, kind_of
from lockstep.data.tokenizer import Tokenizer
from lockstep.errors import UserError, require

CORES = os.cpu_count() or 1
TOKENS = ("train.bin", "val.bin")  # nanoGPT's
BATCH = 1 << 22  # characters of rows that are tokenized at a time


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


def find(data: str, path: Path) -> list[Path]:
    """Find the files of one kind that a path is or has, in the order of their names.

    Raises:
        UserError: they are of several kinds.
    """
    if not path.is_dir():
        return [path]
    found = sorted(each for each in path.iterdir() if kind_of(each) in records.KINDS)
    kinds = sorted({kind_of(each) for each in found})
    kind = f"has {' and '.join(kinds)} files; keep those of one kind"
    require(len(kinds) < 2, "--data", data, kind)
    return found


def has_tokens(folder: Path) -> bool:
    """Say if a folder has a file of tokens as nanoGPT writes it."""
    return any((folder / name).exists() for name in TOKENS)


def make_key(files: list[Path], words: Tokenizer) -> str:
    """Make a key from the sources of the tokens: names, sizes and times of files; the tokenizer."""
    facts = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    content = json.dumps([prepared.VERSION, records.PIECE, words.name, facts])
    return hashlib.sha256(content.encode()).hexdigest()


def prepare(data: str, files: list[Path], folder: str, out: Path, jobs: int = CORES) -> Manifest:
    """Write the folder `out`, unless it is there already; progress goes to stderr.

    Args:
        folder: with a tokenizer.json; "" for bytes.
        jobs: threads of the package `tokenizers`, if nothing has used it yet.

    Raises:
        UserError: `out` holds other things, or no two rows can be used.
    """
    os.environ["RAYON_NUM_THREADS"] = str(jobs)
    words = tokenizer.load(folder)
    key = make_key(files, words)
    if out.exists():
        remedy = "holds other tokens or other things; remove it or name another"
        require(_is_there(out, key), "--out", out, remedy)
        return prepared.read_manifest(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f"{out.name}.") as temporary:
            work = Path(temporary, out.name)
            work.mkdir()
            made = _write(work, data, files, words, key, jobs)
            work.rename(out)
            return made
    except OSError as error:
        if _is_there(out, key):  # another process has just made the same
            return prepared.read_manifest(out)
        remedy = f"cannot be written ({error.strerror}); make room, or name another place"
        raise UserError(f"--out {out}: {remedy}") from None


def _is_there(out: Path, key: str) -> bool:
    return (out / "data.json").exists() and prepared.read_manifest(out).key == key


def _write(
    folder: Path, data: str, files: list[Path], words: Tokenizer, key: str, jobs: int
) -> Manifest:
    bad: list[str] = []
    stream = kind_of(files[0]) == ".txt"
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("tokenizing", total=sum(file.stat().st_size for file in files))

        def documents() -> Iterator[Document]:
            for batch in _batches(records.read(data, files), jobs if stream else 1):
                yield from encode_rows(batch, words, bad)
                progress.advance(task, sum(row.size for row in batch))

        return prepared.write(
            folder, documents(), bad, key=key, source=data, words=words, stream=stream
        )


def _batches(rows: Iterator[Row], least: int) -> Iterator[list[Row]]:
    """Divide rows in batches of BATCH bytes, and of `least` rows: a text's piece is large."""
    batch, size = list[Row](), 0
    for row in rows:
        batch.append(row)
        size += row.size
        if size >= BATCH and len(batch) >= least:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


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
