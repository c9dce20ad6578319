"""Whole checks of pairs whose names say nothing, or the wrong thing: values pair their tensors."""

import json
from typing import Any

import numpy as np
import pytest

from lockstep.check import report
from lockstep.check.check import Result
from lockstep.check.follower import Follower
from lockstep_recorder.operations import fingerprint
from parity_tests.check.follow_pairs import PAIRS
from parity_tests.check.inside import check_pair

# By pair: text changed in the port.
BUGS = {
    "a table in chunks": ("self.table[ids]", "self.table[ids.flip(1)]"),
    "blocks numbered through": ("torch.tanh(self.n2(b))", "torch.sigmoid(self.n2(b))"),
    "kernels of heads": ("q.softmax(-1)", "q.softmax(-2)"),
    "keys and values in one kernel": ("softmax(-1)", "softmax(-2)"),
    "siblings of one shape": ("F.silu", "F.gelu"),
    "a half turn": ("self.bias, padding=1)", "self.bias, padding=1).relu()"),
    "a fused kernel, and layers in a stack": ("q * 2", "q * 3"),
    "the gain first": ("1e-5", "1e-3"),
    "a query scaled before its layer": ("q) * k", "q) / k"),
    "columns joined the other way round": ("torch.tanh(self.a(x)), x", "torch.sin(self.a(x)), x"),
}


def check(name: str, *changes: tuple[str, str], **options: Any) -> Result:
    pair = PAIRS[name]
    return check_pair(pair.program(False), pair.program(True), *changes, again=False, **options)


UNTIED = "a tied head, and one of its own"


@pytest.mark.parametrize("name", [name for name in PAIRS if name != UNTIED])
def test_a_right_port_is_equal_and_is_so_from_the_map_that_values_find(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = check(name)
    assert result.verdict == "equal", [root.name for root in result.roots]
    partners = {
        tensor: list(dict.fromkeys(
            entry.reference.name for entry in result.mapping.entries if entry.port.name == tensor))
        for tensor in PAIRS[name].partners
    }  # fmt: skip
    assert partners == PAIRS[name].partners
    found = report.to_json(result)["mapping"]
    monkeypatch.setattr(Follower, "_live", None)
    again = check(name, overrides=json.loads(json.dumps(found)))
    assert again.verdict == "equal" and report.to_json(again)["mapping"] == found


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_different_and_the_mapping_is_whole(name: str) -> None:
    result = check(name, BUGS[name])
    assert result.verdict == "different"
    assert not result.mapping.only_reference and not result.mapping.only_port


def test_a_tensor_for_what_the_reference_uses_twice_is_the_port_s_alone() -> None:
    """Both start alike, and training parts them."""
    result = check(UNTIED)
    assert result.verdict == "different"
    assert result.mapping.only_port == ["head"]


def test_words_that_values_cross_are_a_difference() -> None:
    """Values alone would call a port right that has its key where the reference has its value."""
    pair = PAIRS["keys and values in one kernel"]
    text = pair.program(port=False)
    crossed = "self.k(x)[:, None], self.v(x)", "self.v(x)[:, None], self.k(x)"
    result = check_pair(text, text, crossed, again=False)
    assert result.verdict == "different"
    assert {(str(e.port), str(e.reference)) for e in result.mapping.entries} == {
        (f"{name}.weight", f"{name}.weight") for name in "qkvo"
    }


def test_a_table_in_another_order_is_a_difference() -> None:
    text = PAIRS["a table in chunks"].program(port=True)
    other = "self.table[ids]", "self.table.flip(0)[ids]"
    assert check_pair(text, text, other, again=False).verdict == "different"


def test_what_a_map_gives_goes_before_what_values_find() -> None:
    """One chunk of a table is given: neither the other chunks nor the table are paired in part."""
    given = {"tensors": [{"reference": {"name": "c"}, "port": {"name": "other"}}]}
    other = ("self.table = P(V, D)", "self.table, self.other = P(V, D), P(3, D)")
    used = ("self.table[ids]", "self.table[ids] + 0 * self.other.sum()")
    result = check("a table in chunks", other, used, overrides=given)
    assert result.mapping.only_reference == ["a", "b"]
    assert result.mapping.only_port == ["table"]


def test_a_mask_by_the_least_float_is_one_by_infinity() -> None:
    """Its squares would overflow, and then be like nothing."""
    by_infinity, by_least = ([1.0, 2.0, mask] for mask in (-np.inf, np.finfo(np.float64).min))
    found = fingerprint(np.array(by_least))
    assert np.isfinite(found).all()
    assert (found == fingerprint(np.array(by_infinity))).all()
