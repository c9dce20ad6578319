"""Reads the rows of .jsonl files, and pieces of text; a bad row has a reason. Maps tokens."""

import os
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lockstep.data.chat import Unusable
from lockstep.errors import UserError, require
from lockstep.files.untrusted import Refused, open_regular, parse_json

PIECE = 1 << 24  # bytes of a text that are tokenized at once, up to the end of a line
LONGEST = 1 << 26  # bytes of a row


class Row(NamedTuple):
    """A row of a file.

    Args:
        place: FILE:NUMBER, the number from 1.
        content: a text, an object, or the `Unusable` that says why it is neither.
        size: bytes of the file that it takes, about.
    """

    place: str
    content: Any
    size: int


def kind_of(file: str | Path) -> str:
    """Return the suffix in lower case, so that DATA.JSONL is read as data.jsonl."""
    return Path(file).suffix.lower()


def read(data: str, file: Path) -> Iterator[Row]:
    """Read the rows of a .jsonl file, or the pieces of a text.

    Raises:
        UserError: the file cannot be read.
    """
    rows = _read_lines(file) if kind_of(file) == ".jsonl" else _read_text(file)
    try:
        for number, content, size in rows:
            yield Row(f"{file.name}:{number}", content, size)
    except Refused as why:
        raise UserError(f"--data {data}: {file.name} is {why}; use other data") from None


def _read_lines(file: Path) -> Iterator[tuple[int, Any, int]]:
    for number, (_, line) in enumerate(_lines(file), 1):
        if line.strip():
            yield number, _parse(line), len(line)


def _parse(line: bytes) -> Any:
    if len(line) > LONGEST:
        return Unusable(f"is longer than {LONGEST} bytes")
    try:
        return parse_json(line, finite=False)
    except Refused as why:
        return Unusable(str(why).removesuffix(" in line 1"))  # the only one that it saw


def _read_text(file: Path) -> Iterator[tuple[int, Any, int]]:
    """Cut a text in pieces: each has the lines that begin in its PIECE bytes."""
    for number, lines in groupby(_lines(file), key=lambda pair: pair[0] // PIECE):
        piece = [line for _, line in lines]
        text = b"".join(piece)
        yield number + 1, text.decode("utf-8", "replace"), len(text)
        if any(len(line) > LONGEST for line in piece):
            yield number + 1, Unusable(f"a line is longer than {LONGEST} bytes, and is cut"), 0


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Read each line and its position; a line that is too long is truncated."""
    with open_regular(file, links=True) as stream:
        begin = 0
        while line := stream.readline(LONGEST + 1):
            yield begin, line
            while len(line) > LONGEST and not line.endswith(b"\n"):
                line = stream.readline(LONGEST + 1)
            begin = stream.tell()


def map_file(data: str, path: Path, dtype: str) -> np.ndarray:
    """Map a file into memory, (items,), read-only.

    Raises:
        UserError: it is no regular file, is empty, or has a part of an item at its end.
    """
    try:
        with open_regular(path, links=True) as file:
            size = os.fstat(file.fileno()).st_size
            require(size > 0, "--data", data, f"{path.name} is empty; use other data")
            kind = np.dtype(dtype)
            remedy = f"{path.name} has {size} bytes, not whole {kind.name} tokens; write it again"
            require(size % kind.itemsize == 0, "--data", data, remedy)
            return np.memmap(file, dtype=kind, mode="r")
    except Refused as why:
        raise UserError(f"--data {data}: {path.name} is {why}; use other data") from None
