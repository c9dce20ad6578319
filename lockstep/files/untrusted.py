"""Untrusted files: opened without waiting, read within bounds, parsed strictly.

What is not as we write it is `Refused`; whoever reads says which file that is, and what to do.
"""

import json
import math
import os
import re
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any

# A sparse file costs its author nothing and a reader hours; so much is read in a second.
HOLES = 1 << 30  # bytes
DEPTH = 50  # of nested lists and objects; ours have up to 8, and writing them is recursive
DIGITS = 20  # of an integer; ours are counts below 2**63, and what is longer fits no float
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # an escape of half a UTF-16 pair, or of a whole one


class Refused(ValueError):
    """The reason why a file is refused, to follow its name in a message."""


def open_regular(file: Path, *, limit: int | None = None, links: bool = False) -> BufferedReader:
    """Opens a regular file of at most `limit` bytes.

    Args:
        links: whether the name may be a symbolic link: where the user named the file, not where it
            is part of a run, for an untrusted run may point at anything.

    Raises:
        Refused: it is anything else.
        OSError: it cannot be opened.
    """
    # Without O_NONBLOCK one waits at a FIFO until somebody writes.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW)
    try:
        descriptor = os.open(file, flags)
    except ValueError:  # a NUL, or half of a UTF-16 pair
        raise Refused("not a valid file name") from None
    except OSError:
        if not links and os.path.islink(file):
            raise Refused("a symbolic link; a run has the file itself") from None
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise Refused("not a regular file")
        if limit is not None and status.st_size > limit:
            raise Refused(f"too large, over {limit} bytes")
        if _is_hollow(descriptor, status.st_size):
            raise Refused(f"sparse, over {HOLES} bytes of holes")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _is_hollow(descriptor: int, size: int) -> bool:
    """Says if more than `HOLES` bytes of a file were never written."""
    at = holes = 0
    while at < size and holes <= HOLES:
        try:
            data = os.lseek(descriptor, at, os.SEEK_DATA)
        except OSError:  # no more data up to the end
            data = size
        holes += data - at
        at = os.lseek(descriptor, data, os.SEEK_HOLE) if data < size else size
    os.lseek(descriptor, 0, os.SEEK_SET)
    return holes > HOLES


def read_json(
    file: Path, *, limit: int, links: bool = False, finite: bool = True
) -> dict[str, Any]:
    """Reads the object in a file of at most `limit` bytes; see `open_regular` and `parse_json`.

    Raises:
        Refused: it is no such file, or holds anything else.
        OSError: it cannot be read.
    """
    with open_regular(file, limit=limit, links=links) as stream:
        size = os.fstat(stream.fileno()).st_size  # read(limit) would take so much memory at once
        text = stream.read(size)
    content = parse_json(text, finite=finite)
    if type(content) is not dict:
        raise Refused("JSON, but not an object")
    if SURROGATE.search(text) and not _is_unicode(content):
        raise Refused("invalid JSON: half of a UTF-16 pair")
    return content


def parse_json(text: bytes, *, finite: bool = True) -> Any:
    """Parses JSON in UTF-8, with unique keys and, if required, finite numbers.

    Raises:
        Refused: anything else, and what is nested deeper than `DEPTH`.
    """
    number = _finite if finite else float
    try:
        content = json.loads(
            text.decode(), object_pairs_hook=_object, parse_int=_integer, parse_float=number,
            parse_constant=number,
        )  # fmt: skip
    except UnicodeDecodeError:
        raise Refused("invalid JSON: not UTF-8") from None
    except json.JSONDecodeError as error:
        raise Refused(f"invalid JSON: {error.msg} in line {error.lineno}") from None
    except RecursionError:
        raise Refused("invalid JSON: nested too deep") from None
    if _is_deeper(content, DEPTH):
        raise Refused("invalid JSON: nested too deep")
    return content


def _is_unicode(content: Any) -> bool:
    """Says if every text in a value can be written, printed and hashed."""
    try:
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_deeper(content: Any, depth: int) -> bool:
    """Says if a value is nested deeper; goes level by level, because recursion has a limit."""
    level = [content] if type(content) in (list, dict) else []
    for _ in range(depth):
        inner = (each.values() if type(each) is dict else each for each in level)
        level = [value for values in inner for value in values if type(value) in (list, dict)]
    return bool(level)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a duplicate key, of which some readers take the first value and some the last."""
    content = dict(pairs)
    if len(content) < len(pairs):
        raise Refused("invalid JSON: duplicate key")
    return content


def _integer(text: str) -> int:
    if len(text) > DIGITS:
        raise Refused(f"invalid JSON: an integer of {len(text)} digits")
    return int(text)


def _finite(text: str) -> float:
    """Refuses NaN and Infinity, which Python reads and JSON does not have."""
    value = float(text)
    if not math.isfinite(value):
        raise Refused(f"invalid JSON: {text[:DIGITS]} is not finite")
    return value
