"""A folder of tokens made ahead: data.json, and of each split tokens, counts and ends.

data.json                 what it is made of, and how much there is
train.bin, val.bin        tokens, one behind the other
train.counts, val.counts  uint8, whether each counts as a target; absent where all do
train.ends, val.ends      uint64, where each document ends; absent where the text is one stream
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.config.fields import require_fields
from lockstep.data.documents import Documents
from lockstep.data.encode import Encoded, Outline, dtype, load_outline, load_part
from lockstep.data.records import kind_of
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
    """
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
    """The tokenizer of these tokens.

    Raises:
        UserError: `--tokenizer` names another, or cannot be read.
    """
    words = load_tokenizer(tokenizer)
    fits = words.name == about.tokenizer
    require(fits, "--tokenizer", tokenizer or "bytes", f"is not that of {folder}; name it")
    return words


def open_splits(folder: Path, about: Manifest, rows: str) -> dict[str, Any]:
    """Each split's tokens, or `Documents`, mapped.

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


def write(
    folder: Path, parts: list[tuple[Path, str]], *, key: str, source: str, words: Tokenizer
) -> Manifest:
    """Joins what the parts hold; of every 20 documents the last is held out, of a stream its last
    tenth.

    Args:
        parts: each with the name of the file whose rows it counts on.

    Raises:
        UserError: there is too little for two splits.
    """
    outlines = [load_outline(part) for part, _ in parts]
    documents, tokens = (int(sum(f(each.sizes) for each in outlines)) for f in (len, np.sum))
    stream, masked = kind_of(parts[0][1]) == ".txt", any(each.masked for each in outlines)
    bad = list(_name_bad([name for _, name in parts], outlines))
    total, least = (tokens, 20) if stream else (documents, 2)
    remedy = f"{documents} rows of it can be used" + (f" ({bad[0]})" if bad else "")
    require(total >= least, "--data", source, f"only {remedy}; two or more are needed")
    writers = {split: Writer(folder, split, masked=masked, stream=stream) for split in SPLITS}
    at = 0
    for part, _ in parts:
        found = load_part(part)
        size = len(found.tokens) if stream else len(found.outline.sizes)
        held = _held_out(np.arange(at, at + size), total, stream=stream)
        for split, chosen in zip(SPLITS, (~held, held)):
            writers[split].add(found, chosen)
        at += size
    train, val = (writers[split] for split in SPLITS)
    about = Manifest(
        version=VERSION, key=key, sha256=_digest(train.close() + val.close()), source=source,
        tokenizer=words.name, dtype=dtype(words.vocab), vocab=words.vocab, masked=masked,
        train=train.tokens, val=val.tokens, train_documents=train.documents,
        val_documents=val.documents, bad=len(bad), named=bad[:NAMED],
    )  # fmt: skip
    durable.replace(folder / "data.json", json.dumps(asdict(about), indent=1) + "\n")
    return about


class Writer:
    """The files of one split."""

    def __init__(self, folder: Path, split: str, *, masked: bool, stream: bool) -> None:
        suffixes = ["bin", *["counts"] * masked, *["ends"] * (not stream)]
        self.files = {name: (folder / f"{split}.{name}").open("xb") for name in suffixes}
        self.digests = {name: hashlib.sha256() for name in suffixes}
        self.tokens = self.documents = 0

    def add(self, found: Encoded, chosen: np.ndarray) -> None:
        """chosen: bool, of the documents of a part, or of a stream's tokens."""
        of_tokens = chosen
        if "ends" in self.files:
            sizes = found.outline.sizes
            ends = np.cumsum(sizes[chosen]) + np.uint64(self.tokens)
            self._write("ends", ends)
            self.documents += len(ends)
            of_tokens = np.repeat(chosen, sizes.astype(np.int64))
        self._write("bin", found.tokens[of_tokens])
        if "counts" in self.files:
            self._write("counts", found.counts[of_tokens])
        self.tokens += int(of_tokens.sum())

    def _write(self, name: str, items: np.ndarray) -> None:
        content = items.tobytes()
        self.files[name].write(content)
        self.digests[name].update(content)

    def close(self) -> str:
        """The SHA-256 of each file, one behind the other."""
        for file in self.files.values():
            file.close()
            durable.sync(Path(file.name))
        return "".join(digest.hexdigest() for digest in self.digests.values())


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _held_out(numbers: np.ndarray, total: int, *, stream: bool) -> np.ndarray:
    """Which of these documents, or of a stream's tokens, are to validate."""
    if stream:
        return numbers >= total - total // 10
    return numbers == total - 1 if total < EVERY else numbers % EVERY == EVERY - 1


def _name_bad(names: list[str], outlines: list[Outline]) -> Iterator[str]:
    """FILE:LINE WHY of each bad row."""
    before, last = 0, ""
    for name, outline in zip(names, outlines):
        before = before if name == last else 0
        yield from (f"{name}:{before + number} {why}" for number, why in outline.bad)
        before, last = before + outline.rows, name
