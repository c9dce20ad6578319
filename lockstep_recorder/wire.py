"""Arrays as safetensors, written out: the user's interpreter need not have the library."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import IO, Any

import numpy as np

Arrays = dict[str, np.ndarray]
NAMES = {"float64": "F64", "float32": "F32"}
DTYPES = {name: dtype for dtype, name in NAMES.items()}


def chunks(arrays: Arrays) -> Iterator[bytes]:
    """{name: array} -> bytes, an array at a time; no float becomes float64, exact below 2**53."""
    header, at = {}, 0
    for name, x in arrays.items():
        dtype = _dtype(x)
        end = at + np.size(x) * dtype.itemsize
        header[name] = {
            "dtype": NAMES[dtype.name], "shape": list(np.shape(x)), "data_offsets": [at, end]
        }  # fmt: skip
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for x in arrays.values():
        yield np.asarray(x, _dtype(x)).tobytes()


def _dtype(x: np.ndarray) -> np.dtype[Any]:
    dtype = np.asarray(x).dtype
    return dtype if dtype.name in NAMES else np.dtype(np.float64)


def parse(content: bytes) -> Arrays:
    """bytes -> {name: array}; from our own process, so it is not checked."""
    length = int.from_bytes(content[:8], "little")
    header, body = json.loads(content[8 : 8 + length]), memoryview(content)[8 + length :]
    found = {}
    for name, about in header.items():
        if name != "__metadata__":
            (begin, end), shape = about["data_offsets"], about["shape"]
            x = np.frombuffer(body[begin:end], DTYPES[about["dtype"]], count=math.prod(shape))
            found[name] = x.reshape(shape).copy()
    return found


def send(stream: IO[bytes], header: dict[str, Any], arrays: Arrays) -> None:
    parts = chunks(arrays)
    head = next(parts)
    size = len(head) + sum(np.size(x) * _dtype(x).itemsize for x in arrays.values())
    line = json.dumps(dict(header, names=list(arrays), body=size))
    stream.write(line.encode() + b"\n" + head)
    for part in parts:
        stream.write(part)
    stream.flush()


def receive(stream: IO[bytes]) -> tuple[dict[str, Any], Arrays] | None:
    """(header, arrays), or None where the other side has closed."""
    line = stream.readline()
    if not line:
        return None
    header = json.loads(line)
    return header, parse(stream.read(header["body"]))


def group(arrays: Arrays, prefix: str) -> Arrays:
    """The arrays named PREFIX/NAME, by NAME."""
    start = prefix + "/"
    return {name[len(start) :]: x for name, x in arrays.items() if name.startswith(start)}
