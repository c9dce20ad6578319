"""Right ports that are made unlike their references are equal; a bug in them is named first."""

import pytest

from lockstep.check.check import Result
from parity_tests.check.inside import check_pair
from parity_tests.check.unlike_programs import FRAME, PAIRS
from parity_tests.tiers import tier

NAMED = (
    "a gated unit of w1, w2 and w3", "fused cells of two directions",
    "cells of gates in two directions", "factors of low rank", "weights in two tensors",
    "experts in one tensor of each layer",
)  # fmt: skip
ONE = ("heads of one fused tensor", "images whose sides are as many as channels")  # root alone
DEAR = ("cells of gates in two directions", "experts in one tensor of each layer")
BUGS = [(name, place) for name, pair in PAIRS.items() for place in ("", *pair.bugs)]


def check(name: str, place: str, follow: bool = True) -> Result:
    pair = PAIRS[name]
    reference, port = (FRAME.format(model=model) for model in (pair.reference, pair.port))
    changes = [pair.bugs[place]] if place else []
    return check_pair(reference, port, *changes, again=False, follow=follow)


def is_dear(name: str, place: str) -> bool:
    return bool(place) and name in DEAR


@tier("rest", guard="fused cells of two directions; experts in one tensor", where=is_dear)
@pytest.mark.parametrize(("name", "place"), BUGS)
def test_the_verdict_and_the_first_place(name: str, place: str) -> None:
    result = check(name, place)
    found = [root.name for root in result.roots]
    assert result.verdict == ("different" if place else "equal"), found
    assert not place or place in found[0], found
    assert not place or name not in ONE or len(found) == 1, found


def test_lines_are_named_where_tensors_are_complex() -> None:
    root, *_ = check("complex tensors", "filter").roots
    assert root.lines and "torch.mul(self.weight.conj(), x)" in root.lines[1]


@pytest.mark.parametrize("name", NAMED)
def test_names_pair_what_is_not_followed(name: str) -> None:
    result = check(name, "", follow=False)
    assert result.verdict == "equal", [str(entry) for entry in result.mapping.entries]
