"""The one exception for users' mistakes: one line, no traceback."""

import math
from typing import Any

LONGEST = 1000  # characters of a line, for a value may be a whole file
TAIL = 300  # of them for its end, where the remedy is
NO_MEMORY = (
    "out of memory",  # torch's allocators of accelerators, and their drivers
    "RESOURCE_EXHAUSTED",  # XLA, on every device
    "allocate memory",  # torch on a CPU: "can't allocate memory"; Linux: "Cannot allocate memory"
    "MemoryError",  # Python and numpy, by the name of the class
)


class UserError(Exception):
    """A mistake of the user's: one line that names field, value and remedy; exit status 2.

    The value may come from an untrusted file: control characters are escaped, and a line that is
    too long loses its middle.
    """

    def __init__(self, message: str) -> None:
        line = printable(message)
        if len(line) > LONGEST:
            line = f"{line[: LONGEST - TAIL]} ... {line[-TAIL:]}"
        super().__init__(line)


def printable(text: str, keep: str = "") -> str:
    """Escapes control characters, except `keep`: text may be untrusted, or a model's."""
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


def is_out_of_memory(error: Exception) -> bool:
    """Says if an exception means that memory ran out; frameworks say so only in words."""
    said = f"{type(error).__name__}: {error}"
    return any(words in said for words in NO_MEMORY)


def why(error: Exception) -> str:
    """Say what went wrong, for a line that names the file itself."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def require(holds: bool, field: str, value: Any, remedy: str) -> None:
    """Raises UserError "field value: remedy" unless `holds`."""
    if not holds:
        raise UserError(f"{field} {value}: {remedy}")


def require_range(field: str, value: float, low: float, high: float = math.inf) -> None:
    """Raises UserError unless low <= value <= high; NaN and infinity never pass.

    Compared only: an int may be too large to become a float.
    """
    bounds = f"at least {low}" if high == math.inf else f"from {low} to {high}"
    require(low <= value <= high and value != math.inf, field, value, f"must be {bounds}")
