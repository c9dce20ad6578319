"""Documents and masks -> the rows of a batch."""

from dataclasses import dataclass

import numpy as np

from lockstep.data.batch import Batch

Piece = tuple[np.ndarray, np.ndarray, np.ndarray]  # tokens, their targets, and which count


@dataclass(frozen=True, eq=False)
class Documents:
    """A split whose tokens are documents, or do not all count as targets.

    counts: bool (tokens,), whether each counts as a target; None: all do.
    ends: int64 (documents,), where each ends; None: windows are anywhere in the stream.
    alone: one document a row, and padding.
    """

    tokens: np.ndarray
    counts: np.ndarray | None = None
    ends: np.ndarray | None = None
    alone: bool = False

    def __len__(self) -> int:
        return len(self.tokens)

    def count_within(self, context: int) -> int:
        """Count the targets within a context's length in each of the first hundred documents."""
        assert self.ends is not None
        firsts = range(min(len(self.ends), 100))
        pieces = [self.whole(first, context)[0] for first in firsts]
        return int(sum(counts.sum() for _, _, counts in pieces))

    def draw(self, numbers: np.ndarray, context: int) -> Batch:
        """Draws rows (B, T), one for each number, uint64 (B,), which may be anything."""
        if self.ends is None:
            starts = (numbers % np.uint64(len(self.tokens) - context)).tolist()
            pieces = [[self.taken(start, start + context + 1)] for start in starts]
        else:
            firsts = (numbers % np.uint64(len(self.ends))).tolist()
            pieces = [self.whole(first, context) for first in firsts]
        tokens, targets, segments = np.zeros((3, len(numbers), context), np.int32)
        counts = np.zeros((len(numbers), context), bool)
        for row, documents in enumerate(pieces):
            at = 0
            for number, piece in enumerate(documents, 1):
                here = row, slice(at, at + len(piece[0]))
                tokens[here], targets[here], counts[here] = piece
                segments[here], at = number, here[1].stop
        return Batch(tokens, targets, counts, None if self.ends is None else segments)

    def whole(self, first: int, context: int) -> list[Piece]:
        """Take a document, truncated if it is too long, and those after it that fit in the row."""
        assert self.ends is not None
        found: list[Piece] = []
        left, number = context, first
        while left > 0 and len(found) < len(self.ends):
            start, stop = (int(self.ends[number - 1]) if number else 0), int(self.ends[number])
            if found and stop - start - 1 > left:
                break
            found.append(self.taken(start, min(stop, start + context + 1)))
            left -= len(found[-1][0])
            number = (number + 1) % len(self.ends)
            if self.alone:
                break
        return found

    def taken(self, start: int, stop: int) -> Piece:
        """Takes tokens, their targets (the next tokens) and whether these count.

        Each array has `stop - start - 1` elements.
        """
        tokens = self.tokens[start:stop].astype(np.int32)
        counts = np.ones(len(tokens) - 1, bool)
        if self.counts is not None:
            counts = self.counts[start + 1 : stop].astype(bool)
        return tokens[:-1], np.where(counts, tokens[1:], 0), counts
