"""Documents and masks -> the rows of a batch."""

from dataclasses import dataclass

import numpy as np

from lockstep.data import rows
from lockstep.data.stream import Tokens
from lockstep.errors import require

Piece = tuple[np.ndarray, np.ndarray]  # tokens, and their targets


@dataclass(frozen=True, eq=False)
class Documents:
    """A split whose tokens are documents, or do not all count as targets.

    counts: uint8 (tokens,), whether each counts as a target; None: all do.
    ends: uint64 (documents,), where each ends; None: windows are anywhere in the stream.
    alone: one document a row, and padding.
    """

    tokens: Tokens
    counts: Tokens | None = None
    ends: np.ndarray | None = None
    alone: bool = False

    def __len__(self) -> int:
        return len(self.tokens)

    def count_within(self, context: int) -> int:
        """Targets that count in a context's length of each document; of the first hundred."""
        assert self.ends is not None
        firsts = range(min(len(self.ends), 100))
        pieces = [self.whole(first, context)[0] for first in firsts]
        return int(sum((targets != rows.IGNORED).sum() for _, targets in pieces))

    def draw(self, numbers: np.ndarray, context: int) -> np.ndarray:
        """uint64 (B,), anything -> planes, int32 (P, B, T): a row for each number."""
        if self.ends is None:
            starts = (numbers % np.uint64(len(self.tokens) - context)).tolist()
            pieces = [[self.taken(start, start + context + 1)] for start in starts]
        else:
            firsts = (numbers % np.uint64(len(self.ends))).tolist()
            pieces = [self.whole(first, context) for first in firsts]
        planes = np.zeros((3, len(numbers), context), np.int32)
        planes[1] = rows.IGNORED
        for row, documents in enumerate(pieces):
            at = 0
            for number, (tokens, targets) in enumerate(documents, 1):
                end = at + len(tokens)
                planes[:, row, at:end] = tokens, targets, np.full(len(tokens), number)
                at = end
        return planes if self.ends is not None else planes[:2]

    def whole(self, first: int, context: int) -> list[Piece]:
        """A document, cut at its end where it is too long, and those after it that fit."""
        assert self.ends is not None
        found: list[Piece] = []
        left, number = context, first
        while left > 0 and len(found) < len(self.ends):
            start, stop = (int(self.ends[number - 1]) if number else 0), int(self.ends[number])
            fits = 0 <= start <= stop <= len(self.tokens)
            require(fits, "--data", "documents", "their ends are not in order; prepare them again")
            if found and stop - start - 1 > left:
                break
            found.append(self.taken(start, min(stop, start + context + 1)))
            left -= len(found[-1][0])
            number = (number + 1) % len(self.ends)
            if self.alone:
                break
        return found

    def taken(self, start: int, stop: int) -> Piece:
        """Tokens and the target of each, which is the next one; less than `stop - start` by one."""
        tokens = self.tokens[start:stop].astype(np.int32)
        targets = tokens[1:]
        if self.counts is not None:
            targets = np.where(self.counts[start + 1 : stop], targets, rows.IGNORED)
        return tokens[:-1], targets
