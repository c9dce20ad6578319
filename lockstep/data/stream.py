"""Tokens in files, mapped and not read: raw uint16, or with llm.c's header."""

import os
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lockstep.errors import UserError, require
from lockstep.files.untrusted import Refused, open_regular

HEADER = 256  # int32 numbers of llm.c's: magic, version, tokens


class Form(NamedTuple):
    version: int
    dtype: str


FORMS = {20240520: Form(1, "<u2"), 20240801: Form(7, "<u4")}  # by magic: GPT-2's and Llama 3's


class Joined:
    """Several arrays as one, of which slices can be taken."""

    def __init__(self, pieces: Sequence[np.ndarray]) -> None:
        self.pieces, self.dtype = pieces, np.result_type(*pieces)
        self.ends = list(accumulate(map(len, pieces)))

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(len(self))
        taken, at = [], start
        while at < stop:
            number = bisect_right(self.ends, at)
            begin = self.ends[number] - len(self.pieces[number])
            taken.append(self.pieces[number][at - begin : stop - begin])
            at = self.ends[number]
        return np.concatenate(taken) if taken else np.zeros(0, self.dtype)


Tokens = np.ndarray | Joined


def join(pieces: Sequence[np.ndarray]) -> Tokens:
    return pieces[0] if len(pieces) == 1 else Joined(pieces)


def map_file(data: str, path: Path, dtype: str, offset: int = 0) -> np.ndarray:
    """Map a file into memory, (items,), read-only.

    Raises:
        UserError: it is no regular file, is empty, or has a part of an item at its end.
    """
    try:
        with open_regular(path, links=True) as file:
            size = os.fstat(file.fileno()).st_size - offset
            require(size > 0, "--data", data, f"{path.name} is empty; use other data")
            kind = np.dtype(dtype)
            remedy = f"{path.name} has {size} bytes, not whole {kind.name} tokens; write it again"
            require(size % kind.itemsize == 0, "--data", data, remedy)
            return np.memmap(file, dtype=kind, mode="r", offset=offset)
    except Refused as why:
        raise UserError(f"--data {data}: {path.name} is {why}; use other data") from None


def map_tokens(data: str, path: Path) -> np.ndarray:
    """Map the tokens (tokens,) of a .bin file: nanoGPT's, which has no header, or llm.c's."""
    start = map_file(data, path, "<u1")[: 4 * HEADER].tobytes()
    magic, version, count = np.frombuffer(start[:12].ljust(12, b"\0"), "<i4").tolist()
    if len(start) < 4 * HEADER or magic not in FORMS:
        return map_file(data, path, "<u2")
    form = FORMS[magic]
    remedy = f"{path.name} has llm.c's header, version {version}; version {form.version} is known"
    require(version == form.version, "--data", data, remedy)
    tokens = map_file(data, path, form.dtype, 4 * HEADER)
    remedy = f"{path.name} has {len(tokens)} tokens, its header says {count}; write it again"
    require(len(tokens) == count, "--data", data, remedy)
    return tokens
