"""A process whose weights are not those of the others is named."""

import pytest

from lockstep.train.alike import Print, find_apart


@pytest.mark.parametrize(
    ("bits", "apart"),
    [([7, 7, 7], []), ([7, 8, 7], [1]), ([8, 7, 7], [0]), ([7, 8], [1]), ([7], [])],
)
def test_who_is_apart_is_named(bits: list[int], apart: list[int]) -> None:
    assert find_apart([Print(0, number) for number in bits]) == apart


def test_other_parts_have_other_numbers() -> None:
    prints = [Print(0, 1), Print(1, 2), Print(0, 1), Print(1, 3)]
    assert find_apart(prints[:3]) == []
    assert find_apart(prints) == [3]
