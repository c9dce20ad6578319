"""Files that a stranger may have made: opened without waiting, read within bounds, parsed strictly.

What is not as we write it is `Refused`; whoever reads says which file that is, and what to do.
"""

import json
import math
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any

# A file of holes costs its author nothing and a reader hours; so much is read in a second.
HOLES = 1 << 30  # bytes
DEPTH = (
    50  # of lists and objects in each other; ours have up to 8, and what is written is recursive
)
DIGITS = 20  # of a whole number; ours are counts below 2**63, and longer ones take long to read


class Refused(ValueError):
    """Why a file is not taken, to be put behind its name."""


def opened(file: Path, *, limit: int | None = None, links: bool = False) -> BufferedReader:
    """A regular file of at most `limit` bytes.

    Args:
        links: whether the name may be a symbolic link: where the user named the file, not where it
            is part of a run, for a run from elsewhere may point at anything.

    Raises:
        Refused: it is anything else.
        OSError: it cannot be opened.
    """
    # Without O_NONBLOCK one waits at a FIFO until somebody writes.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW)
    try:
        descriptor = os.open(file, flags)
    except ValueError:  # a NUL, or half of a UTF-16 pair
        raise Refused("no name that a file can have") from None
    except OSError:
        if not links and os.path.islink(file):
            raise Refused("a link, where a run has the file itself") from None
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise Refused("not a regular file")
        if limit is not None and status.st_size > limit:
            raise Refused(f"too large, over {limit} bytes")
        if _hollow(descriptor, status.st_size):
            raise Refused("little but holes")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _hollow(descriptor: int, size: int) -> bool:
    """Whether more than `HOLES` bytes were never written; that ends the search, too."""
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
    """The object in a file of at most `limit` bytes; see `opened` and `parsed`.

    Raises:
        Refused: it is no such file, or holds anything else.
        OSError: it cannot be read.
    """
    with opened(file, limit=limit, links=links) as stream:
        text = stream.read(limit + 1)
    if len(text) > limit:  # it grew, or its size is not said, as under /proc
        raise Refused(f"too large, over {limit} bytes")
    content = parsed(text, finite=finite)
    if type(content) is not dict:
        raise Refused("JSON, but not an object")
    return content


def parsed(text: bytes, *, finite: bool = True) -> Any:
    """JSON in UTF-8, with every key once, and, if they must be, every number finite.

    Raises:
        Refused: anything else, and what is nested deeper than `DEPTH`.
    """
    number = _finite if finite else float
    try:
        content = json.loads(
            text.decode(), object_pairs_hook=_object, parse_int=_whole, parse_float=number,
            parse_constant=number,
        )  # fmt: skip
    except RecursionError:
        raise Refused("no JSON to trust, nested too deep") from None
    except UnicodeDecodeError:
        raise Refused("no JSON, not text in UTF-8") from None
    except json.JSONDecodeError as error:
        raise Refused(f"no JSON, {error.msg} in line {error.lineno}") from None
    if _deeper(content, DEPTH):
        raise Refused("no JSON to trust, nested too deep")
    return content


def _deeper(content: Any, depth: int) -> bool:
    level = [content]
    for _ in range(depth + 1):
        holders = [each for each in level if type(each) in (list, dict)]
        level = [
            value for each in holders for value in (each.values() if type(each) is dict else each)
        ]
    return any(type(each) in (list, dict) for each in level)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of a key that comes twice, readers take now the first and now the last."""
    content = dict(pairs)
    if len(content) < len(pairs):
        raise Refused("no JSON to trust, a key comes twice")
    return content


def _whole(text: str) -> int:
    if len(text) > DIGITS:
        raise Refused(f"no JSON to trust, a number of {len(text)} digits")
    return int(text)


def _finite(text: str) -> float:
    """Also of NaN and Infinity, which Python reads and JSON does not have."""
    value = float(text)
    if not math.isfinite(value):
        raise Refused(f"no JSON to trust, {text[:DIGITS]} is not finite")
    return value
