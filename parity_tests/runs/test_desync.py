"""A process whose weights are not those of the others is named."""

import pytest

from lockstep.train.desync import Fingerprint, find_desynced


@pytest.mark.parametrize(
    ("bits", "desynced"),
    [([7, 7, 7], []), ([7, 8, 7], [1]), ([8, 7, 7], [0]), ([7, 8], [1]), ([7], [])],
)
def test_who_is_desynced_is_named(bits: list[int], desynced: list[int]) -> None:
    assert find_desynced([Fingerprint(0, number) for number in bits]) == desynced


def test_other_parts_have_other_numbers() -> None:
    prints = [Fingerprint(0, 1), Fingerprint(1, 2), Fingerprint(0, 1), Fingerprint(1, 3)]
    assert find_desynced(prints[:3]) == []
    assert find_desynced(prints) == [3]
