"""A folder of tokens made ahead: data.json, and of each split tokens, counts and ends.

data.json                 what it is made of, and how much there is
train.bin, val.bin        tokens, one behind the other
train.counts, val.counts  uint8, whether each counts as a target; absent where all do
train.ends, val.ends      uint64, where each document ends; absent where the text is one stream
"""

import hashlib
import json
import os
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lockstep.config.fields import require_fields
from lockstep.data.documents import Documents
from lockstep.data.stream import map_file
from lockstep.data.tokenizer import Tokenizer
from lockstep.data.tokenizer import load as load_tokenizer
from lockstep.errors import UserError, require, why
from lockstep.files import durable
from lockstep.files.untrusted import Refused, read_json

VERSION = 1
NAMED = 10  # bad rows
SPLITS = ("train", "val")
EVERY = 20  # documents: one of them is held out
LARGEST = 1 << 20  # bytes of data.json


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of data.json."""

    version: int
    key: str  # of files, tokenizer and form
    sha256: str
    source: str
    tokenizer: str  # its name
    dtype: str
    vocab: int
    masked: bool  # some tokens do not count
    train: int  # tokens
    val: int
    train_documents: int  # 0: one stream
    val_documents: int
    bad: int  # rows left out
    named: list  # the first of them, file:line and why


def read_manifest(folder: Path) -> Manifest:
    """Read a folder's data.json.

    Raises:
        UserError: there is none, or it is not as `write` makes it.
    """
    file, remedy = folder / "data.json", "prepare it again with lockstep data"
    try:
        content = read_json(file, limit=LARGEST, links=True)
    except (Refused, OSError) as error:
        raise UserError(f"--data {folder}: data.json: {why(error)}; {remedy}") from None
    types = {f.name: f.type for f in fields(Manifest)}
    require_fields(str(file), content, types)
    found = Manifest(**content)
    sane = (
        found.version == VERSION and found.dtype in ("<u1", "<u2", "<u4")
        and 2 <= found.vocab <= 2**31 and min(found.train, found.val) >= 2
        and all(type(line) is str for line in found.named)
    )  # fmt: skip
    require(sane, "--data", folder, f"data.json is not as this version writes it; {remedy}")
    return found


def load_words(folder: Path, about: Manifest, tokenizer: str) -> Tokenizer:
    """Load the tokenizer of these tokens.

    Raises:
        UserError: `--tokenizer` names another, or cannot be read.
    """
    words = load_tokenizer(tokenizer)
    fits = words.name == about.tokenizer
    require(fits, "--tokenizer", tokenizer or "bytes", f"is not that of {folder}; name it")
    return words


def open_splits(folder: Path, about: Manifest, rows: str) -> dict[str, Any]:
    """Map each split's tokens, or `Documents`.

    Raises:
        UserError: a file is missing or of another size.
    """
    if rows == "auto":
        rows = "pack" if about.masked else "stream"
    documents = about.train_documents > 0
    remedy = "the text is one stream, not documents; use stream"
    require(rows == "stream" or documents, "--rows", rows, remedy)
    return {split: _open(folder, about, split, rows) for split in SPLITS}


def _open(folder: Path, about: Manifest, split: str, rows: str) -> Any:
    def array(suffix: str, dtype: str, size: int) -> np.ndarray:
        path = folder / f"{split}.{suffix}"
        remedy = "prepare it again with lockstep data"
        require(path.exists(), "--data", folder, f"no {path.name} in it; {remedy}")
        found = map_file(str(folder), path, dtype)
        fits = len(found) == size
        require(fits, "--data", folder, f"{path.name} has {len(found)} items, not {size}; {remedy}")
        return found

    tokens = array("bin", about.dtype, getattr(about, split))
    counts = array("counts", "<u1", len(tokens)) if about.masked else None
    if rows == "stream":
        return tokens if counts is None else Documents(tokens, counts)
    ends = array("ends", "<u8", getattr(about, f"{split}_documents"))
    return Documents(tokens, counts, ends, alone=rows == "pad")


class Document(NamedTuple):
    """The tokens of a row, or of a piece of a text.

    Args:
        tokens: (n,).
        counts: bool (n,), whether each counts as a target.
    """

    tokens: np.ndarray
    counts: np.ndarray


class Writer:
    """Write the files of one split, a document at a time."""

    def __init__(self, stack: ExitStack, folder: Path, split: str, dtype: str) -> None:
        self.dtypes = {"bin": dtype, "counts": "<u1", "ends": "<u8"}
        self.files = {
            name: stack.enter_context((folder / f"{split}.{name}").open("w+b"))
            for name in self.dtypes
        }
        self.tokens = self.documents = 0
        self.masked = False

    def add(self, document: Document) -> None:
        self.tokens += len(document.tokens)
        self.documents += 1
        self.masked |= not document.counts.all()
        for name, items in (*zip(("bin", "counts"), document), ("ends", np.array([self.tokens]))):
            self.files[name].write(items.astype(self.dtypes[name]).tobytes())

    def take_last(self, count: int) -> Document:
        """Take so many tokens back, as one document."""
        self.tokens -= count
        self.documents -= 1
        taken = [self._take(name, count) for name in ("bin", "counts")]
        self._take("ends", 1)
        return Document(taken[0], taken[1].astype(bool))

    def _take(self, name: str, count: int) -> np.ndarray:
        file, dtype = self.files[name], np.dtype(self.dtypes[name])
        start = file.seek(-count * dtype.itemsize, os.SEEK_END)
        items = np.frombuffer(file.read(), dtype)
        file.truncate(start)
        file.seek(start)
        return items

    def finish(self, *, masked: bool, stream: bool) -> str:
        """Keep the files with content; return the SHA-256 of each, one after the other."""
        digests = []
        for name, file in self.files.items():
            file.flush()
            path = Path(file.name)
            if {"bin": True, "counts": masked, "ends": not stream}[name]:
                durable.sync(path)
                with path.open("rb") as again:
                    digests.append(hashlib.file_digest(again, "sha256").hexdigest())
            else:
                path.unlink()
        return "".join(digests)


def write(
    folder: Path, documents: Iterable[Document], bad: list[str], *, key: str, source: str,
    words: Tokenizer, stream: bool,
) -> Manifest:  # fmt: skip
    """Write documents; every twentieth is held out, or the last tenth of a stream.

    Args:
        bad: the rows that were left out, as `documents` goes on to name them.
        stream: whether they are pieces of one text.

    Raises:
        UserError: there is too little for two splits.
    """
    dtype = "<u1" if words.vocab <= 1 << 8 else "<u2" if words.vocab <= 1 << 16 else "<u4"
    with ExitStack() as stack:
        train, val = (Writer(stack, folder, split, dtype) for split in SPLITS)
        size = 0
        for number, document in enumerate(documents):
            (val if number % EVERY == EVERY - 1 and not stream else train).add(document)
            size = len(document.tokens)
        count = train.documents + val.documents
        remedy = f"{count} rows of it can be used" + (f" ({bad[0]})" if bad else "")
        enough = train.tokens >= 20 if stream else count >= 2
        require(enough, "--data", source, f"only {remedy}; two or more are needed")
        if stream or not val.documents:
            val.add(train.take_last(train.tokens // 10 if stream else size))
        masked = train.masked or val.masked
        digests = [split.finish(masked=masked, stream=stream) for split in (train, val)]
    about = Manifest(
        version=VERSION, key=key, sha256=hashlib.sha256("".join(digests).encode()).hexdigest(),
        source=source, tokenizer=words.name, dtype=dtype, vocab=words.vocab, masked=masked,
        train=train.tokens, val=val.tokens, train_documents=0 if stream else train.documents,
        val_documents=0 if stream else val.documents, bad=len(bad), named=bad[:NAMED],
    )  # fmt: skip
    durable.replace(folder / "data.json", json.dumps(asdict(about), indent=1) + "\n")
    return about
