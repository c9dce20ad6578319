"""How our processes talk: a question is a line of JSON and arrays, and so is its answer.

The arrays follow as safetensors, written out here: a user's interpreter need not have the library.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import select
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
Message = tuple[dict[str, Any], Arrays]
NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
    "bool": "BOOL",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in NAMES.items()}
FRAMES = 4  # the last ones, told with an exception
LARGE = 1 << 26  # bytes of a message from which a file has them
LEAVING = 10.0  # seconds that a process may go on for when nobody hears its answer


def chunks(arrays: Arrays) -> Iterator[Any]:
    """Yields safetensors' bytes, an array at a time.

    A dtype that numpy has not becomes one that holds it exactly: bfloat16 float32, others float64.
    """
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
        yield np.ascontiguousarray(x, _dtype(x)).reshape(-1).view(np.uint8).data


def _dtype(x: np.ndarray) -> np.dtype[Any]:
    dtype = np.asarray(x).dtype
    if dtype.name in NAMES:
        return dtype
    return np.dtype(np.float32 if dtype.name == "bfloat16" else np.float64)


def parse(content: bytes | bytearray | mmap.mmap) -> Arrays:
    """Reads safetensors' bytes; they are from our own process, so they are not checked.

    Returns:
        Views of the bytes, which share their memory; copies where they are not aligned.
    """
    length = int.from_bytes(content[:8], "little")
    header, body = json.loads(content[8 : 8 + length]), memoryview(content)[8 + length :]
    found = {}
    for name, about in header.items():
        if name != "__metadata__":
            (begin, end), shape = about["data_offsets"], about["shape"]
            x = np.frombuffer(body[begin:end], DTYPES[about["dtype"]], count=math.prod(shape))
            found[name] = (x if x.flags.aligned else x.copy()).reshape(shape)
    return found


def send(stream: Any, header: dict[str, Any], arrays: Arrays) -> None:
    parts = chunks(arrays)
    head = next(parts)
    size = len(head) + sum(np.size(x) * _dtype(x).itemsize for x in arrays.values())
    stream.write(json.dumps(dict(header, body=size)).encode() + b"\n" + head)
    for part in parts:
        stream.write(part)
    stream.flush()
    for body in {id(each): each for x in arrays.values() if (each := _file_of(x))}.values():
        _let_go(body)


def _file_of(x: Any) -> mmap.mmap | None:
    """Returns the file of which an array is a view, such as a received message's; None where it is
    none, or where changes stay in memory alone."""
    while isinstance(x, np.ndarray) and getattr(x, "mode", "") != "c" and x.base is not None:
        x = x.base
    owner = x.obj if isinstance(x, memoryview) else x
    return owner if isinstance(owner, mmap.mmap) else None


def _let_go(body: Any) -> None:
    """Gives the pages of a file back to it; what is looked at comes back."""
    if isinstance(body, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        body.madvise(mmap.MADV_DONTNEED)


def receive(stream: Any) -> Message | None:
    """Returns (header, arrays), or None where the other side has closed."""
    line = stream.readline()
    if not line:
        return None
    header = json.loads(line)
    size = header.pop("body")
    body = _room(size)
    view, at = memoryview(body), 0
    while at < size:
        count = stream.readinto(view[at:])
        if not count:
            return None
        at += count
    _let_go(body)
    return header, parse(body)


def _room(size: int) -> Any:
    """Returns bytes to be written: of memory, or of a file without a name where they are many."""
    if size < LARGE:
        return bytearray(size)
    with tempfile.TemporaryFile(prefix="lockstep-message-") as file:
        file.truncate(size)
        return mmap.mmap(file.fileno(), size)


def take_connection() -> socket.socket:
    """Returns the socket that this process was started with as its stdin, which is then empty."""
    connection = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    return connection


def serve(
    connection: socket.socket,
    start: Callable[[], Callable[[dict[str, Any], Arrays], Message]],
    told: type[Exception],
) -> None:
    """Answers questions until the other side closes; an exception is an answer, too.

    This process does not outlive who asks it, whatever it is at.

    Args:
        start: called with the first question; returns the function that answers.
        told: exceptions that are told by their text alone, after their `frames` if they have any.
    """
    answer = None
    watch = threading.Thread(target=_end_after_close, args=[connection.fileno()], daemon=True)
    watch.start()
    with suppress(ConnectionError), connection, connection.makefile("rwb") as stream:
        while True:
            asked = receive(stream)
            if asked is None:
                return
            try:
                answer = answer or start()
                header, arrays = answer(*asked)
            except Exception as error:
                header, arrays = _failure(error, isinstance(error, told)), {}
            send(stream, header, arrays)
            del asked, arrays  # before the next arrive, for they may be large


def _failure(error: Exception, told: bool) -> dict[str, Any]:
    if told:
        return {"error": str(error), "frames": getattr(error, "frames", []), "told": True,
                "refuses": getattr(error, "refuses", "")}  # fmt: skip
    said = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
    frames = frame_lines(traceback.extract_tb(error.__traceback__))
    return {"error": said, "frames": frames, "told": False}


def _end_after_close(descriptor: int) -> None:
    """Ends this process some time after the other side closes.

    One that idles ends by itself; one of a world may wait for ever for another's part.
    """
    ends = select.poll()
    ends.register(descriptor, 0)  # a hang-up is told unasked
    ends.poll()
    time.sleep(LEAVING)
    os._exit(1)


def frame_lines(stack: Iterable[traceback.FrameSummary]) -> list[str]:
    """Returns a line for each of the last frames."""
    return [
        f"{os.path.basename(f.filename)}, line {f.lineno}, in {f.name}: {f.line}"
        for f in list(stack)[-FRAMES:]
    ]


def group(arrays: Arrays, prefix: str) -> Arrays:
    """Returns the arrays named PREFIX/NAME, by NAME."""
    start = prefix + "/"
    return {name[len(start) :]: x for name, x in arrays.items() if name.startswith(start)}
