"""Fused tensors whose parts are no blocks are paired with their parts, either way round."""

from typing import Any

import pytest

from lockstep.check import report
from lockstep.check.check import Result
from parity_tests.check.fused_pairs import LAYERS
from parity_tests.check.inside import check_pair
from parity_tests.tiers import tier

SECOND = "each second column"
WAYS = [(name, fused) for name in LAYERS if name != SECOND for fused in (True, False)]
BUGS = [
    (name, fused, bug)
    for name, layer in LAYERS.items()
    for fused in (True, False)
    for bug in (layer.bugs_of_fused if fused else layer.bugs)
]
PROMPT = (SECOND, "a query, a key and a value in each head",
          "experts in a stack, their parts in blocks")  # fmt: skip
# Layers of which most pairs of parts have one shape, so that many are tried.
SEARCHED = ("values and gates of two factors, in two tensors",
            "values and gates of two factors, in turns",
            "three values and three gates, in two tensors")  # fmt: skip


def is_later(name: str) -> bool:
    return name not in PROMPT


def check_layer(name: str, fused: bool, bug: str = "", **options: Any) -> Result:
    """Checks the port that has the tensors fused, or the one that has them apart."""
    layer = LAYERS[name]
    bugs = layer.bugs_of_fused if fused else layer.bugs
    changes = [bugs[bug]] if bug else []
    both = layer.program(not fused), layer.program(fused)
    return check_pair(*both, *changes, again=False, **options)


@tier("rest", guard="the other layers", where=lambda name: name in SEARCHED)
@pytest.mark.parametrize(("name", "fused"), WAYS)
def test_a_right_port_is_equal(name: str, fused: bool) -> None:
    result = check_layer(name, fused)
    assert result.verdict == "equal", [root.name for root in result.roots]
    assert not result.shuffled


@tier("rest", guard="the bugs of three layers", where=is_later)
@pytest.mark.parametrize(("name", "fused", "bug"), BUGS)
def test_a_bug_in_it_is_different(name: str, fused: bool, bug: str) -> None:
    assert check_layer(name, fused, bug).verdict == "different"


@pytest.mark.parametrize("fused", [True, False])
def test_each_second_row_is_one_piece_of_a_map_that_can_be_given(fused: bool) -> None:
    found = check_layer(SECOND, fused)
    assert found.verdict == "equal" and not found.shuffled
    pieces = [str(entry.port if fused else entry.reference) for entry in found.mapping.entries]
    assert "gate_up.weight[1:10:2]" in pieces and len(pieces) == 8
    given = report.to_json(found)["mapping"]
    again = check_layer(SECOND, fused, overrides=given)
    assert again.verdict == "equal"
    assert all(entry.given for entry in again.mapping.entries)
