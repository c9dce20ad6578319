"""A check that the processes of a run still have the same weights where they should.

Gradients are averaged, so loss and norms stay the same on all when one process's weights change
alone: by a broken chip, or by a bug.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

EVERY = 20.0  # seconds


class Fingerprint(NamedTuple):
    """Two numbers of a process's part of the weights."""

    place: int  # which parts of which tensors: those with the same should have the same numbers
    bits: int  # a checksum of the numbers


def ask(
    places: Sequence[object], sums: Sequence[int], tell_all: Callable[[int], list[int]]
) -> list[int]:
    """Share this process's fingerprints, and find the ranks with other weights.

    Args:
        places: where one's parts of the tensors lie.
        sums: the sums of their bits.
        tell_all: tells the others a number, and returns those of all.
    """
    told = (tell_all(zlib.crc32(repr(each).encode())) for each in (places, sums))
    return find_desynced([Fingerprint(*each) for each in zip(*told)])


def find_desynced(prints: Sequence[Fingerprint]) -> list[int]:
    """Find the ranks that differ from most replicas of the same shard; of two, the second."""
    found = []
    for place in dict.fromkeys(each.place for each in prints):
        those = [(rank, each.bits) for rank, each in enumerate(prints) if each.place == place]
        [(usual, _)] = Counter(bits for _, bits in those).most_common(1)
        found += [rank for rank, bits in those if bits != usual]
    return sorted(found)
