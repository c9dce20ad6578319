"""Safetensors files one tensor at a time: nothing is held but the tensor in hand.

Files are untrusted. They are read, not mapped: one that is cut short meanwhile is an error, and not
the end of the process.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lockstep.files.durable import sync
from lockstep.files.tensors import DTYPES, HEADER_LIMIT
from lockstep.files.untrusted import Refused, open_regular, parse_json

CODES = {name: code for code, name in DTYPES.items()}


class Entry(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    start: int  # bytes from the file's beginning


class TensorFile:
    """An open file; close it, or use it in a `with`."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            Refused: it is no safetensors file of floats.
            OSError: it cannot be read.
        """
        self.path = path
        self.stream: BufferedReader = open_regular(path, links=True)
        try:
            self.entries = _entries(self.stream)
        except BaseException:
            self.stream.close()
            raise

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(self, *error: Any) -> None:
        self.stream.close()

    def read(self, name: str, out: np.ndarray) -> None:
        """Fills a C-contiguous array of the tensor's dtype with its first rows.

        Raises:
            Refused: the file ends before.
        """
        read_into(self.stream, self.entries[name].start, out)


def read_into(stream: BufferedReader, start: int, out: np.ndarray) -> None:
    """Raises Refused where the file ends before."""
    assert out.flags.c_contiguous
    stream.seek(start)
    if out.nbytes and stream.readinto(out.reshape(-1).view(np.uint8).data) < out.nbytes:
        raise Refused("cut short")


def _entries(stream: BufferedReader) -> dict[str, Entry]:
    size = os.fstat(stream.fileno()).st_size
    length = int.from_bytes(stream.read(8), "little")
    if not 2 <= length <= min(HEADER_LIMIT, size - 8):
        raise Refused(f"no safetensors file: a header of {length} bytes")
    header = parse_json(stream.read(length))
    if type(header) is not dict:
        raise Refused("no safetensors file: its header is no object")
    header.pop("__metadata__", None)
    return {name: _entry(name, given, 8 + length, size) for name, given in header.items()}


def _entry(name: str, given: Any, base: int, size: int) -> Entry:
    if type(given) is not dict or given.keys() != {"dtype", "shape", "data_offsets"}:
        raise Refused(f"no safetensors file: {name} has no dtype, shape and data_offsets")
    dtype, shape, span = given["dtype"], given["shape"], given["data_offsets"]
    if type(dtype) is not str or dtype not in DTYPES:
        raise Refused(f"{name} is of dtype {str(dtype)[:20]}; only {', '.join(DTYPES)} are read")
    if not (_are_counts(shape) and _are_counts(span) and len(span) == 2 and len(shape) <= 8):
        raise Refused(f"no safetensors file: {name} has no shape or no offsets")
    bytes_ = math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize
    if span[1] - span[0] != bytes_ or base + span[1] > size:
        raise Refused(f"cut short or damaged: {name} has not its {bytes_} bytes")
    return Entry(DTYPES[dtype], tuple(shape), base + span[0])


def _are_counts(values: Any) -> bool:
    return type(values) is list and all(type(n) is int and n >= 0 for n in values)


def write(
    path: Path, dtype: str, shapes: Mapping[str, tuple[int, ...]], tensors: Iterable[np.ndarray]
) -> None:
    """Tensors in the order of `shapes`, each asked for when the one before it is written.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    width, start = np.dtype(dtype).itemsize, 0
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    for name, shape in shapes.items():
        stop = start + math.prod(shape) * width
        offsets = [start, stop]
        header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": offsets}
        start = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape, tensor in zip(shapes.values(), tensors, strict=True):
            assert tensor.shape == shape
            exact = np.ascontiguousarray(tensor.astype(dtype, copy=False))
            file.write(exact.reshape(-1).view(np.uint8).data)
    sync(path)
