"""Which indices of an operation's result a program reads apart, such as the columns of a query in
each head of a fused layer: these are the parts of the tensor that the operation meets.

The reference's tape is recorded: its values show it by their fingerprints. The port's is played:
labels are put in the result's place."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from math import gcd

import numpy as np

from lockstep.check.tapes import Known, LiveTape, RecordedTape, are_alike, row_of

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
    """Indices of one axis of an operation's result that a later value of the port holds alone."""

    value: int
    axis: int  # of the result
    indices: np.ndarray

    def size_of(self, tape: LiveTape) -> int:
        return tape.values[self.value].size


def parted(tape: LiveTape, number: int, ahead: list[int]) -> list[tuple[Selection, ...]]:
    """Finds the ways in which the port takes an operation's result apart into two to four parts.

    Args:
        ahead: values that are made of the result and of what is known. A bias is taken for zero.
    """
    result = tape.values[number]
    labels = np.arange(1.0, result.size + 1).reshape(result.shape)
    zeros = {f: np.zeros(tape.values[f].shape) for n in ahead for f in tape.frontiers(n)}
    trials = [zeros | {number: x} for x in (labels, result.size + 1 - labels)]
    found: dict[bytes, Selection] = {}
    for n, (one, two) in tape.values_of(trials, ahead).items():
        moved = np.array_equal(one, np.round(one)) and np.array_equal(two, result.size + 1 - one)
        elements = np.unique(one) if moved else np.zeros(0)
        if elements.size == one.size < result.size:
            key = elements.tobytes()
            part = _along_an_axis(n, elements.astype(np.int64) - 1, result.shape)
            found |= {key: part} if part and key not in found else {}
    return [group for count in (2, 3, 4) for group in combinations(found.values(), count)
            if _make_up_all(group, result.shape)]  # fmt: skip


def _along_an_axis(value: int, elements: np.ndarray, shape: tuple[int, ...]) -> Selection | None:
    whole = int(np.prod(shape))
    for axis, places in enumerate(np.unravel_index(elements, shape)):
        indices = np.unique(places)
        if elements.size * shape[axis] == whole * indices.size < whole * shape[axis]:
            return Selection(value, axis, indices)
    return None


def _make_up_all(parts: tuple[Selection, ...], shape: tuple[int, ...]) -> bool:
    axis = parts[0].axis
    together = np.concatenate([part.indices for part in parts])
    return {part.axis for part in parts} == {axis} and (
        np.array_equal(np.sort(together), np.arange(shape[axis]))
    )
