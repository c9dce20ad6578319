"""Safetensors files, opened to read parts of their tensors.

Memory holds no more than the tensor in hand. Files are untrusted: safetensors requires that the
header describes tensors that fill the file; here the header's size is bounded before, and only
floats are read. A file is mapped: one that another process cuts short meanwhile ends this process.
"""

import hashlib
import json
import math
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np
from safetensors import SafetensorError, safe_open

from lockstep.files.untrusted import Refused, open_regular

DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
# Bytes: the deepest model (config.DEEPEST), with biases and checksums, has 4,400,000. The library
# takes up to 100 MB, of which it makes a GB of objects in 20 seconds.
HEADER_LIMIT = 6_000_000
MOST_AXES = 8
MAPPED = 1 << 20  # bytes of a tensor that is read only where it is used


def open_safetensors(path: Path, stream: BinaryIO) -> tuple[Any, int]:
    """Open a file whose tensors fill it; return it, and its header's length in bytes.

    Args:
        stream: the file, of which the first 8 bytes are read.

    Raises:
        Refused: it is no such file, or its header is too long.
    """
    length = int.from_bytes(stream.read(8), "little")
    if length > HEADER_LIMIT:
        raise Refused(f"no safetensors file: a header of {length} bytes")
    try:
        return safe_open(path, "numpy"), length
    except SafetensorError as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        raise Refused(f"no safetensors file, or cut short or damaged: {reason}") from None


class TensorEntry(NamedTuple):
    dtype: str
    shape: tuple[int, ...]


class TensorFile:
    """An open safetensors file; close it, or use it in a `with`."""

    def __init__(self, path: Path, *, links: bool = True) -> None:
        """
        Args:
            links: whether the path may be a symbolic link.

        Raises:
            Refused: it is no safetensors file of floats.
            OSError: it cannot be read.
        """
        with open_regular(path, links=links) as stream:
            self.file, _ = open_safetensors(path, stream)
        self.path = path
        names = self.file.keys()
        self.entries = {name: _entry(name, self.file.get_slice(name)) for name in names}

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(self, *error: Any) -> None:
        self.file.__exit__(None, None, None)

    def tensors(self) -> dict[str, "SavedTensor"]:
        """Map names to tensors that are read where they are indexed."""
        return {name: SavedTensor(self, name) for name in self.entries}

    def read(self, name: str, out: np.ndarray) -> None:
        """Fill an array with a tensor's first rows."""
        out[...] = self.read_slice(name, (slice(len(out)),) if out.ndim else ())

    def read_slice(self, name: str, place: tuple[slice, ...]) -> np.ndarray:
        """Read a part of a tensor into a new array.

        Args:
            place: a slice for each of the first axes, within the tensor.
        """
        dtype, shape = self.entries[name]
        part = np.broadcast_to(np.empty((), dtype), shape)[place]
        # The library takes no empty slice at a tensor's end.
        return self.file.get_slice(name)[place] if part.size else part.copy()


class SavedTensor:
    """A tensor of an open file; `saved[index]` reads that part alone."""

    def __init__(self, file: TensorFile, name: str) -> None:
        self.file, self.name, self.shape = file, name, file.entries[name].shape
        self.dtype = np.dtype(file.entries[name].dtype)

    def __getitem__(self, index: Any) -> np.ndarray:
        """Read a part.

        Args:
            index: `...`, or a slice for each of the first axes.
        """
        slices = () if index is ... else index if type(index) is tuple else (index,)
        bounds = [slice(*s.indices(n)[:2]) for s, n in zip(slices, self.shape, strict=False)]
        return self.file.read_slice(self.name, tuple(bounds))


def checksum(path: Path) -> str:
    """Compute the SHA-256 of a file that is no link."""
    with open_regular(path) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def map_all(path: Path) -> dict[str, np.ndarray]:
    """Map all tensors of a file that is no link into memory; changes are not written back.

    Memory is taken as they are read. Errors as `TensorFile`'s.
    """
    with TensorFile(path, links=False) as file, open_regular(path) as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
        return {
            name: np.memmap(
                stream, entry.dtype, "c", 8 + length + header[name]["data_offsets"][0], entry.shape
            )
            if math.prod(entry.shape) * np.dtype(entry.dtype).itemsize >= MAPPED
            else file.read_slice(name, ())
            for name, entry in file.entries.items()
        }


def _entry(name: str, tensor: Any) -> TensorEntry:
    code, shape = tensor.get_dtype(), tuple(tensor.get_shape())
    if code not in DTYPES:
        raise Refused(f"{name} is of dtype {code}; only {', '.join(DTYPES)} are read")
    if len(shape) > MOST_AXES:
        raise Refused(f"{name} has {len(shape)} axes; at most {MOST_AXES} are read")
    return TensorEntry(DTYPES[code], shape)
