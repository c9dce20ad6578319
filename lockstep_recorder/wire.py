"""Arrays as safetensors, written out: the user's interpreter need not have the library."""

from __future__ import annotations

import json
import math
from typing import IO, Any

import numpy as np

Arrays = dict[str, np.ndarray]
NAMES = {"float64": "F64", "float32": "F32"}
DTYPES = {name: dtype for dtype, name in NAMES.items()}


def dump(arrays: Arrays) -> bytes:
    """{name: array} -> bytes; what is no float becomes float64, exactly below 2**53."""
    header, bodies, at = {}, [], 0
    for name, x in arrays.items():
        x = np.asarray(x)
        x = np.ascontiguousarray(x if x.dtype.name in NAMES else x.astype(np.float64))
        end = at + x.nbytes
        dtype = NAMES[x.dtype.name]
        header[name] = {"dtype": dtype, "shape": list(np.shape(x)), "data_offsets": [at, end]}
        bodies.append(x.tobytes())
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *bodies])


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
    body = dump(arrays)
    line = json.dumps(dict(header, names=list(arrays), body=len(body)))
    stream.write(line.encode() + b"\n" + body)
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
