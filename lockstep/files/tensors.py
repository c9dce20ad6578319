"""A safetensors file -> arrays, in one pass that checks everything before it makes room for it.

The safetensors library maps a file into memory, and a file that is cut short meanwhile kills the
process. Here nothing is allocated that is not in the file, and one reading gives the arrays and the
checksum, so that what was checked is what was read.

The format: 8 bytes, the header's length; the header, JSON, name -> dtype, shape, data_offsets; the
tensors' bytes, little-endian, without a gap (github.com/huggingface/safetensors).
"""

import hashlib
import math
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np

from lockstep.files.untrusted import Refused, opened, parsed
from lockstep.model.params import Arrays

DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
FIELDS = {"dtype", "shape", "data_offsets"}
HEADER_LIMIT = 4_000_000  # bytes; the deepest model (config.DEEPEST), with biases, has 3,200,000
DIMENSIONS = 8
NAME_LIMIT = 200  # characters
LENGTH = 8  # bytes of the header's length
PIECE = 1 << 20  # bytes hashed at once


class Tensor(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int  # bytes, from the header's end


class Damaged(Exception):
    """The bytes are not those of the checksum; the message is empty."""


def read(file: Path, sha256: str) -> Arrays:
    """The arrays by name, in the order of their bytes.

    Raises:
        Damaged: another file than that of the checksum, or one cut short.
        Refused: it has this checksum, and is still no safetensors file of floats.
        OSError: it cannot be read.
    """
    with opened(file) as stream:
        reader = _Reader(stream)
        try:
            arrays = {tensor.name: reader.array(tensor) for tensor in reader.header()}
        except Refused:
            reader.rest()
            if reader.digest.hexdigest() == sha256:
                raise
            raise Damaged from None
        reader.rest()
    if reader.digest.hexdigest() != sha256:
        raise Damaged
    return arrays


class _Reader:
    """Whatever it reads goes into the digest."""

    def __init__(self, stream: BufferedReader) -> None:
        self.stream, self.digest = stream, hashlib.sha256()
        self.size = stream.seek(0, 2)
        stream.seek(0)

    def header(self) -> list[Tensor]:
        length = int.from_bytes(self.bytes(LENGTH), "little")
        data = self.size - LENGTH - length
        if data < 0 or length > HEADER_LIMIT:
            raise Refused(f"a header of {length} bytes")
        return tensors(parsed(self.bytes(length)), data)

    def bytes(self, count: int) -> bytes:
        found = self.stream.read(count)
        self.digest.update(found)
        return found

    def array(self, tensor: Tensor) -> np.ndarray:
        array = np.empty(tensor.shape, tensor.dtype)
        room = array.reshape(-1).view(np.uint8).data
        for start in range(0, len(room), PIECE):
            piece = room[start : start + PIECE]
            if self.stream.readinto(piece) != len(piece):
                raise Refused("cut short while it was read")
            self.digest.update(piece)
        return array

    def rest(self) -> None:
        while self.bytes(PIECE):
            pass


def tensors(header: Any, size: int) -> list[Tensor]:
    """What a header says, in the order of the bytes.

    Raises:
        Refused: it is no header, or not that of `size` bytes of floats.
    """
    if type(header) is not dict:
        raise Refused("a header that is no JSON object")
    found = [_tensor(name, entry) for name, entry in header.items() if name != "__metadata__"]
    found.sort(key=lambda tensor: tensor.begin)
    at = 0
    for tensor in found:
        if tensor.begin != at:
            raise Refused("tensors that overlap, or leave a gap")
        at = tensor.end
    if at != size:
        raise Refused(f"tensors of {at} bytes in place of {size}")
    return found


def _tensor(name: str, entry: Any) -> Tensor:
    if type(entry) is not dict or entry.keys() != FIELDS:
        raise Refused("a tensor without its dtype, shape and data_offsets alone")
    if not (name.isprintable() and len(name) <= NAME_LIMIT):
        raise Refused("a tensor whose name nobody can read")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if type(dtype) is not str or dtype not in DTYPES:
        raise Refused(f"a tensor of dtype {str(dtype)[:20]}; only {', '.join(DTYPES)} are read")
    if not _counts(shape, least=1) or len(shape) > DIMENSIONS:
        raise Refused("a tensor whose shape is not a few positive numbers")
    if not _counts(offsets, least=0) or len(offsets) != 2:
        raise Refused("a tensor whose data_offsets are not two numbers")
    begin, end = offsets
    wide = np.dtype(DTYPES[dtype]).itemsize
    if end - begin != math.prod(shape) * wide:
        raise Refused("a tensor whose bytes are not those of its shape")
    return Tensor(name, DTYPES[dtype], tuple(shape), begin, end)


def _counts(values: Any, *, least: int) -> bool:
    return type(values) is list and all(type(v) is int and v >= least for v in values)
