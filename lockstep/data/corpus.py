"""Text -> tokens: the standard library's own source, or users' files.

The standard library changes with the Python.
"""

import os
import platform
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from lockstep.config import BPE
from lockstep.data.documents import Documents
from lockstep.data.encoding import encode_documents, encode_text
from lockstep.data.records import kind_of, map_file
from lockstep.data.tokenizer import load as load_tokenizer
from lockstep.errors import UserError, require

LOOKED_AT = 1 << 26  # tokens, so that a run on 5 GB starts in a second
BYTES = 256
PAGE = "docs/finetune.md says how"
TESTS = {"test", "tests", "idle_test"}
INSTALLED = {"site-packages", "dist-packages", "__pycache__"}
LOCAL = ("_sysconfigdata", "sitecustomize", "usercustomize")  # differ from machine to machine


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokens, uint8 to uint32; `train` and `val` are (tokens,), or documents."""

    train: Any
    val: Any
    source: str  # for people: where the tokens came from
    vocab: int  # the vocabulary the tokens need: 256 for bytes, else the largest token + 1

    @property
    def sizes(self) -> tuple[int, int]:
        """Count the tokens of both splits: by these a resumed run knows its data."""
        return len(self.train), len(self.val)


def load(data: str, tokenizer: str = "", rows: str = "auto") -> Corpus:
    """Load the corpus that `--data` names.

    Args:
        data: "stdlib"; a .txt or .jsonl file; a .bin file of raw uint16 tokens, or a folder
            with nanoGPT's train.bin and val.bin. Files are mapped, not read, unless they have to be
            tokenized.
        tokenizer: a folder with a tokenizer.json; "" for bytes.
        rows: "stream", "pack", "pad" or "auto".

    Raises:
        UserError: there is no such data, it cannot be read, or it is not in this form.
    """
    if data == "stdlib":
        plain = not tokenizer and rows in ("auto", "stream")
        require(plain, "--data", data, "is bytes in one stream; name a file, or drop the flags")
        return _standard_library()
    try:
        return _from_path(data, Path(data), tokenizer, rows)
    except OSError as error:
        raise UserError(
            f"--data {data}: cannot read {error.filename or data} ({error.strerror}); "
            "make it readable or use other data"
        ) from None


def check(corpus: Corpus, vocab: int, context: int, init: str = "") -> None:
    """Raises UserError unless the tokens fit the vocabulary and each split has something to learn:
    a window's length or, of documents, a target that counts.

    init: where the model is from, if the run did not choose its vocabulary.
    """
    if vocab < corpus.vocab:
        largest = max(map(_largest, (corpus.train, corpus.val)))
        preset = " or --model gpt2" if BYTES < corpus.vocab <= BPE else ""
        if corpus.vocab > BPE and isinstance(corpus.train, np.memmap):
            preset = ", or write the file as raw uint16 tokens, without a header"
        remedy = f"the data's largest token is {largest}; use --vocab {corpus.vocab}{preset}"
        if init:
            own = f"beyond the {vocab} of --init {init}; use the tokenizer of that model"
            require(largest < vocab, "--data", f"has token {largest}", own)
        require(largest < vocab, "--vocab", vocab, remedy)
    for name, tokens in (("train", corpus.train), ("val", corpus.val)):
        if isinstance(tokens, Documents) and tokens.ends is not None:  # a row is as long as it is
            seen = tokens.count_within(context)
            remedy = (
                f"no target counts in the first {context} tokens of the {name} split's documents"
            )
            require(seen > 0, "--context", context, f"{remedy}; use a longer one")
            continue
        fits = len(tokens) - 1
        shorter = f"use --context {fits} or less, or more data" if fits > 0 else "use more data"
        problem = f"the {name} split has {len(tokens)} tokens, a window takes {context + 1}"
        require(context <= fits, "--context", context, f"{problem}; {shorter}")


def _from_path(data: str, path: Path, tokenizer: str, rows: str) -> Corpus:
    remedy = "no such file or folder; use stdlib or a path that exists"
    require(path.exists(), "--data", data, remedy)
    kind = kind_of(path)
    if kind in (".txt", ".bin") or path.is_dir():
        remedy = "text and token files are one stream, not documents; use stream"
        require(rows in ("auto", "stream"), "--rows", rows, remedy)
    if path.is_dir():
        return _from_folder(data, path)
    remedy = f"not one of .txt, .jsonl, .bin; rename it if it is, or prepare one ({PAGE})"
    require(kind in (".txt", ".jsonl", ".bin"), "--data", data, remedy)
    if kind == ".bin" or (kind == ".txt" and not tokenizer):
        tokens = map_file(data, path, "<u2" if kind == ".bin" else "u1")
        end = len(tokens) - len(tokens) // 10
        return _corpus(tokens[:end], tokens[end:], str(path))
    words = load_tokenizer(tokenizer)
    if kind == ".txt":
        train, val, bad = encode_text(data, path, words)
    else:
        train, val, bad = encode_documents(data, path, words, rows)
    left_out = f" ({len(bad):,} rows left out: {bad[0]} ...)" if bad else ""
    return Corpus(train, val, str(path) + left_out, words.vocab)


def _from_folder(data: str, folder: Path) -> Corpus:
    """Map nanoGPT's train.bin and val.bin."""
    files = folder / "train.bin", folder / "val.bin"
    # Release 0.2.0 made folders with a data.json: their .bin files are of other widths.
    known = all(file.exists() for file in files) and not (folder / "data.json").exists()
    remedy = f"no folder of train.bin and val.bin with raw uint16 tokens; prepare them ({PAGE})"
    require(known, "--data", data, remedy)
    train, val = (map_file(data, file, "<u2") for file in files)
    return _corpus(train, val, str(folder))


def _corpus(train: np.ndarray, val: np.ndarray, source: str) -> Corpus:
    vocab = BYTES if train.dtype == np.uint8 else max(map(_largest, (train, val))) + 1
    return Corpus(train, val, source, vocab)


def _largest(tokens: np.ndarray | Documents) -> int:
    """Find the largest of the first tokens; those after them are looked at when they are drawn."""
    tokens = tokens.tokens if isinstance(tokens, Documents) else tokens
    return int(tokens[:LOOKED_AT].max(initial=0))


def _standard_library() -> Corpus:
    """Load the standard library; a module is held out as a whole, by its name."""
    root = Path(sysconfig.get_path("stdlib"))
    train: list[bytes] = []
    val: list[bytes] = []
    for relative in _modules(root):
        try:
            source = (root / relative).read_bytes()
        except OSError:
            continue
        held_out = zlib.crc32(os.fsencode(relative.as_posix())) % 20 == 0
        (val if held_out else train).append(source)
    remedy = "this Python has no library source; use a .txt file or a folder"
    require(bool(train and val), "--data", "stdlib", remedy)
    name = f"standard library of Python {platform.python_version()}"
    tokens = [np.frombuffer(b"".join(each), np.uint8) for each in (train, val)]
    return _corpus(tokens[0], tokens[1], name)


def _modules(root: Path) -> list[PurePath]:
    """List the relative paths of the library's own modules, sorted as POSIX paths."""
    found: list[PurePath] = []
    for folder, subfolders, files in os.walk(root):
        left_out = {name for name in subfolders if name.startswith("config-")}
        subfolders[:] = set(subfolders) - TESTS - INSTALLED - left_out
        modules = [name for name in files if name.endswith(".py") and not name.startswith(LOCAL)]
        found += [PurePath(folder, name).relative_to(root) for name in modules]
    return sorted(found, key=PurePath.as_posix)
