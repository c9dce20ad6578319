"""`--loss-chunks`: head and loss in chunks of rows, so that memory holds one chunk's logits."""

import re

from lockstep.errors import require

MOST_LOGITS = 2**27  # of a chunk by `auto`: 2,048 rows of GPT-2's vocabulary, 0.5 GB in float32


def check(value: str) -> None:
    """Raises UserError unless the text is auto or a number of chunks."""
    fits = value == "auto" or re.fullmatch("[1-9][0-9]{0,8}", value) is not None
    require(fits, "--loss-chunks", value, "use auto, or a whole number from 1")


def count(value: str, rows: int, vocab: int) -> int:
    """Count the chunks, at most; by `auto` each has the largest fitting power of two of rows."""
    if value == "auto":
        most = max(1, MOST_LOGITS // vocab)
        return -(-rows // 2 ** (most.bit_length() - 1))
    return min(int(value), rows)


def size(rows: int, chunks: int) -> int:
    """Counts the rows of each chunk; the last may be smaller."""
    return -(-rows // chunks)


def sizes(rows: int, chunks: int) -> list[int]:
    each = size(rows, chunks)
    return [min(each, rows - start) for start in range(0, rows, each)]
