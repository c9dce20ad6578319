"""Untrusted files: opened only if regular and of bounded size, parsed strictly.

Raises `Refused` for malformed input. Callers add the file's name and a remedy.
"""

import json
import math
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any

SHOWN = 20  # characters of a refused number


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
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


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
        content = parse_json(stream.read(size), finite=finite)
    if type(content) is not dict:
        raise Refused("JSON, but not an object")
    return content


def parse_json(text: bytes, *, finite: bool = True) -> Any:
    """Parses JSON in UTF-8, with unique keys and, if required, finite numbers.

    Raises:
        Refused: anything else.
    """
    number = _finite if finite else float
    try:
        return json.loads(
            text.decode(),
            object_pairs_hook=_object,
            parse_float=number,
            parse_constant=number,
        )
    except UnicodeDecodeError:
        raise Refused("invalid JSON: not UTF-8") from None
    except json.JSONDecodeError as error:
        raise Refused(f"invalid JSON: {error.msg} in line {error.lineno}") from None
    except RecursionError:
        raise Refused("invalid JSON: nested too deep") from None
    except Refused:
        raise
    except ValueError:  # Python reads no integer of more than 4,300 digits
        raise Refused("invalid JSON: an integer is too long") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a duplicate key, of which some readers take the first value and some the last."""
    content = dict(pairs)
    if len(content) < len(pairs):
        raise Refused("invalid JSON: duplicate key")
    return content


def _finite(text: str) -> float:
    """Refuses NaN and Infinity, which Python reads and JSON does not have."""
    value = float(text)
    if not math.isfinite(value):
        raise Refused(f"invalid JSON: {text[:SHOWN]} is not finite")
    return value
