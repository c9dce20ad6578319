"""Safetensors files one tensor at a time: nothing is held but the tensor in hand.

Our own keep the checksum of each tensor in the header; who knows the header's can read one tensor
and know that it is right. Files are untrusted. They are read, not mapped: one that is cut short
meanwhile is an error, and not the end of the process.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

from lockstep.files.durable import sync
from lockstep.files.tensors import DTYPES, HEADER_LIMIT, Damaged
from lockstep.files.untrusted import Refused, open_regular, parse_json

CODES = {name: code for code, name in DTYPES.items()}


class Entry(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    start: int  # bytes from the file's beginning
    sha256: str = ""  # as the header says, if it does

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class TensorFile:
    """An open file; close it, or use it in a `with`."""

    def __init__(self, path: Path, *, header_sha256: str = "", links: bool = True) -> None:
        """
        Args:
            header_sha256: what the header has to be; "": anything.

        Raises:
            Damaged: another header.
            Refused: it is no safetensors file of floats.
            OSError: it cannot be read.
        """
        self.path = path
        self.stream: BufferedReader = open_regular(path, links=links)
        try:
            self.entries = _entries(self.stream, header_sha256)
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


def header_sha256(path: Path) -> str:
    with open_regular(path) as stream:
        return hashlib.sha256(_header(stream)).hexdigest()


def _header(stream: BufferedReader) -> bytes:
    """With its length, which is 8 bytes."""
    size = os.fstat(stream.fileno()).st_size
    first = stream.read(8)
    length = int.from_bytes(first, "little")
    if not 2 <= length <= min(HEADER_LIMIT, size - 8):
        raise Refused(f"no safetensors file: a header of {length} bytes")
    return first + stream.read(length)


def _entries(stream: BufferedReader, sha256: str) -> dict[str, Entry]:
    text, size = _header(stream), os.fstat(stream.fileno()).st_size
    if sha256 not in ("", hashlib.sha256(text).hexdigest()):
        raise Damaged
    header = parse_json(text[8:])
    if type(header) is not dict:
        raise Refused("no safetensors file: its header is no object")
    about = header.pop("__metadata__", {})
    sums = about if type(about) is dict else {}
    entries = {
        name: _entry(name, given, len(text), size)._replace(sha256=str(sums.get(name, "")))
        for name, given in header.items()
    }
    at = len(text)
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.bytes)):
        if entry.start != at:
            raise Refused("no safetensors file: its tensors overlap or leave a gap")
        at += entry.bytes
    if at != size:
        raise Refused(f"no safetensors file: {size - at} bytes behind its tensors")
    return entries


def _entry(name: str, given: Any, base: int, size: int) -> Entry:
    if type(given) is not dict or given.keys() != {"dtype", "shape", "data_offsets"}:
        raise Refused(f"no safetensors file: {name} has no dtype, shape and data_offsets")
    dtype, shape, span = given["dtype"], given["shape"], given["data_offsets"]
    if type(dtype) is not str or dtype not in DTYPES:
        raise Refused(f"{name} is of dtype {str(dtype)[:20]}; only {', '.join(DTYPES)} are read")
    if not (_are_counts(shape) and _are_counts(span) and len(span) == 2 and len(shape) <= 8):
        raise Refused(f"no safetensors file: {name} has no shape or no offsets")
    entry = Entry(DTYPES[dtype], tuple(shape), base + span[0])
    if span[1] - span[0] != entry.bytes or base + span[1] > size:
        raise Refused(f"cut short or damaged: {name} has not its {entry.bytes} bytes")
    return entry


def _are_counts(values: Any) -> bool:
    return type(values) is list and all(type(n) is int and n >= 0 for n in values)


def write_checked(path: Path, arrays: Mapping[str, np.ndarray]) -> str:
    """The checksum of the header, which has those of its tensors.

    Raises:
        OSError, SafetensorError: the disk is full, or the folder cannot be written.
    """
    # save_file writes memory as it lies, which for a transposed view is silently wrong;
    # np.ascontiguousarray would turn a scalar into a vector.
    whole = {name: np.asarray(x, order="C") for name, x in arrays.items()}
    sums = {name: checksum(x) for name, x in whole.items()}
    save_file(whole, path, metadata=sums or None)  # {} would be invalid JSON without tensors
    sync(path)
    return header_sha256(path)


def read_entries(path: Path, header_sha256: str = "") -> dict[str, Entry]:
    """Of a file that is no link; errors as `TensorFile`'s."""
    with TensorFile(path, header_sha256=header_sha256, links=False) as file:
        return file.entries


def read_checked(path: Path, entry: Entry) -> np.ndarray:
    """One tensor of a file that `write_checked` wrote.

    Raises:
        Refused: it is another one, or cut short.
        OSError: it cannot be read.
    """
    array = np.empty(entry.shape, entry.dtype)
    with open_regular(path) as stream:
        read_into(stream, entry.start, array)
    if checksum(array) != entry.sha256:
        raise Refused("damaged")
    return array


def checksum(array: np.ndarray) -> str:
    return hashlib.sha256(array.reshape(-1).view(np.uint8).data).hexdigest()


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
