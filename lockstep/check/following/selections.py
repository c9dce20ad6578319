"""Which indices of an operation's result a program reads apart, such as the columns of a query in
each head of a fused layer: these are the parts of the tensor that the operation meets.

The reference's tape is recorded: its values show it by their fingerprints. The port's is played:
what is no number is put in the result's place."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, combinations
from math import gcd

import numpy as np

from lockstep.check.following.tapes import Known, LiveTape, RecordedTape, are_alike, row_of

MOST_PLAYED = 4_000_000  # elements of values that are played to find of what they are made
MOVED = 6  # values behind an operation that may hold its result, such as its sum with a bias


def read_apart(
    tape: RecordedTape, known: Known, meeting: int, length: int, part: int
) -> list[np.ndarray]:
    """Finds the indices of an axis of an operation's result that a later value of the reference
    holds alone, by its fingerprint.

    The indices are those of a slice, in each of some equal blocks of the axis: of one block a slice
    of all, of blocks of two each second index, of a block for each head the head's query.

    Args:
        length: of the axis.
        part: how many of its indices the value holds.

    Returns:
        The indices, ascending, of each such value.
    """
    found: dict[bytes, np.ndarray] = {}
    for number in _holding(tape, meeting):
        size, rest = divmod(tape.values[number].size * part, length)
        later = tape.made_of(number) & {*known.by_size.get(size, ())} if not rest else set()
        wanted = [known.rows[n] for n in sorted(later)]
        for along in tape.marginals_of(number) if wanted else ():
            if len(along) == length:
                for indices in _alike(along, part, np.array(wanted), known.tolerance):
                    found.setdefault(indices.tobytes(), indices)
    return list(found.values())


def _holding(tape: RecordedTape, meeting: int) -> list[int]:
    """Lists an operation and the next that change its result in place alone, as a bias does."""
    found = [meeting]
    size = tape.values[meeting].size
    for n in tape.below(meeting, MOVED):
        if {*tape.data_inputs(n)} <= {*found} and tape.values[n].size == size:
            found.append(n)
    return found


def _alike(
    along: np.ndarray, part: int, wanted: np.ndarray, tolerance: float
) -> Iterator[np.ndarray]:
    """Yields the indices of an axis whose fingerprint is among those that are wanted.

    Args:
        along: the marginals of the axis, see `marginals`.
    """
    length = len(along)
    common = gcd(length, part)
    limits = np.array([0, 1, 1, 2]) * tolerance * wanted[:, [3, 3, 3, 4]]
    for blocks in (n for n in range(1, common + 1) if common % n == 0):
        width, block = part // blocks, length // blocks
        sums = along[:, :4].reshape(blocks, block, 4).sum(0).cumsum(0)
        sums = np.concatenate([np.zeros((1, 4)), sums])
        windows = sums[width:] - sums[:-width]
        near = (np.abs(windows[:, None] - wanted[:, 1:5]) <= limits).all(-1).any(-1)
        for start in np.flatnonzero(near):
            places = np.arange(blocks)[:, None] * block + start + np.arange(width)
            indices = places.ravel()
            if are_alike(wanted, row_of(along[indices], int(wanted[0, 0])), tolerance).any():
                yield indices


@dataclass(frozen=True)
class Selection:
    """Indices of one axis of an operation's result that a later value of the port is made of."""

    axis: int  # of the result
    indices: np.ndarray


def parted(
    tape: LiveTape, number: int, ahead: list[int], lengths: set[int], met: set[int]
) -> list[tuple[Selection, ...]]:
    """Finds the ways in which the port takes an operation's result apart into two to four parts,
    at once or behind what is done to each element, such as a gate.

    Args:
        ahead: values that are made of the result and of what is known.
        lengths: of the axes that may be taken apart.
        met: values without a partner that are met on the way to these. Each is taken for ones.
    """
    result = tape.values[number]
    smaller = [n for n in ahead if tape.is_float(n) and 1 < tape.values[n].size < result.size]
    ones = {f: np.ones(tape.values[f].held) for f in met}
    found: list[tuple[Selection, ...]] = []
    for axis, length in enumerate(result.shape):
        if length not in lengths - {1}:
            continue
        parts: dict[bytes, Selection] = {}
        for indices in _read_alone(tape, number, axis, smaller, ones):
            if len(indices) < length:
                parts.setdefault(indices.tobytes(), Selection(axis, indices))
        found += [group for count in (2, 3, 4) for group in combinations(parts.values(), count)
                  if _make_up_all(group, length)]  # fmt: skip
    return found


def _read_alone(
    tape: LiveTape, number: int, axis: int, targets: list[int], also: dict[int, np.ndarray]
) -> Iterator[np.ndarray]:
    """Yields the indices of an axis of a result of which values are made, ascending, of each value
    whose elements are made of one index each.

    What is no number stands at the indices whose binary digit is one, and then zero: an element
    is no number in one of both, for each digit, and so tells its index.
    """
    shape = tape.values[number].shape
    places = np.arange(shape[axis]).reshape([-1 if k == axis else 1 for k in range(len(shape))])
    digits = range(int(shape[axis] - 1).bit_length())
    most = MOST_PLAYED // (2 * len(digits))
    kept = [n for n, total in zip(targets, accumulate(tape.values[n].size for n in targets))
            if total <= most]  # fmt: skip
    trials = [
        also | {number: np.where(places >> digit & 1 == one, np.nan, np.ones(shape))}
        for digit in digits for one in (1, 0)
    ]  # fmt: skip
    for values in tape.values_of(trials, kept).values() if kept else ():
        told = np.isnan(np.array(values)).reshape(len(digits), 2, -1)
        if told.sum(1).min() == told.sum(1).max() == 1:
            yield np.unique(sum(told[digit, 0].astype(np.int64) << digit for digit in digits))


def _make_up_all(parts: tuple[Selection, ...], length: int) -> bool:
    together = np.concatenate([part.indices for part in parts])
    return np.array_equal(np.sort(together), np.arange(length))
