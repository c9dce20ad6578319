"""Whole checks of pairs whose names say nothing, or the wrong thing: values pair their tensors."""

import json
from pathlib import Path

import numpy as np
import pytest

from lockstep.check import lines, report
from lockstep.check.check import Result
from lockstep_recorder.operations import fingerprint
from parity_tests.check.follow_pairs import PAIRS
from parity_tests.check.inside import check_inside
from parity_tests.check.test_comparisons import record

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


def check(name: str, folder: Path, changes: tuple[str, str] = ("", "")) -> Result:
    pair = PAIRS[name]
    text = pair.program(port=True)
    assert changes[0] in text
    (folder / "port.py").write_text(text.replace(*changes) if changes[0] else text)
    return check_inside(record(pair.program(port=False), folder), folder / "port.py")


UNTIED = "a tied head, and one of its own"


@pytest.mark.parametrize("name", [name for name in PAIRS if name != UNTIED])
def test_a_right_port_is_equal(name: str, tmp_path: Path) -> None:
    result = check(name, tmp_path)
    assert result.verdict == "equal", [root.name for root in result.roots]
    partners = {
        tensor: list(dict.fromkeys(
            entry.reference.name for entry in result.mapping.entries if entry.port.name == tensor))
        for tensor in PAIRS[name].partners
    }  # fmt: skip
    assert partners == PAIRS[name].partners


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_different_and_the_mapping_is_whole(name: str, tmp_path: Path) -> None:
    result = check(name, tmp_path, BUGS[name])
    assert result.verdict == "different"
    assert not result.mapping.only_reference and not result.mapping.only_port


def test_a_tensor_for_what_the_reference_uses_twice_is_the_port_s_alone(tmp_path: Path) -> None:
    """Both start alike, and training parts them."""
    result = check(UNTIED, tmp_path)
    assert result.verdict == "different"
    assert result.mapping.only_port == ["head"]


def test_words_that_values_cross_are_a_difference(tmp_path: Path) -> None:
    """Values alone would call a port right that has its key where the reference has its value."""
    pair = PAIRS["keys and values in one kernel"]
    text = pair.program(port=False)
    crossed = text.replace("self.k(x)[:, None], self.v(x)", "self.v(x)[:, None], self.k(x)")
    assert crossed != text
    (tmp_path / "port.py").write_text(crossed)
    result = check_inside(record(text, tmp_path), tmp_path / "port.py")
    assert result.verdict == "different"
    assert {(str(e.port), str(e.reference)) for e in result.mapping.entries} == {
        (f"{name}.weight", f"{name}.weight") for name in "qkvo"
    }


def test_a_table_in_another_order_is_a_difference(tmp_path: Path) -> None:
    text = PAIRS["a table in chunks"].program(port=True)
    other = text.replace("self.table[ids]", "self.table.flip(0)[ids]")
    (tmp_path / "port.py").write_text(other)
    assert check_inside(record(text, tmp_path), tmp_path / "port.py").verdict == "different"


@pytest.mark.parametrize("name", [name for name in PAIRS if name != UNTIED])
def test_the_map_that_values_find_is_taken_without_them(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = report.to_json(check(name, tmp_path))["mapping"]
    monkeypatch.setattr(lines, "follow_data", None)
    trace = record(PAIRS[name].program(port=False), tmp_path)
    result = check_inside(trace, tmp_path / "port.py", overrides=json.loads(json.dumps(found)))
    assert result.verdict == "equal"
    assert report.to_json(result)["mapping"] == found


def test_what_a_map_gives_goes_before_what_values_find(tmp_path: Path) -> None:
    """One chunk of a table is given: neither the other chunks nor the table are paired in part."""
    pair = PAIRS["a table in chunks"]
    text = pair.program(port=True).replace("self.table[ids]", "self.table[ids] + 0 * self.other")
    text = text.replace("self.table = P(V, D)", "self.table, self.other = P(V, D), P(3, D)")
    (tmp_path / "port.py").write_text(text.replace("0 * self.other", "0 * self.other.sum()"))
    given = {"tensors": [{"reference": {"name": "c"}, "port": {"name": "other"}}]}
    result = check_inside(
        record(pair.program(port=False), tmp_path), tmp_path / "port.py", overrides=given
    )
    assert result.mapping.only_reference == ["a", "b"]
    assert result.mapping.only_port == ["table"]


def test_a_mask_by_the_least_float_is_one_by_infinity() -> None:
    """Its squares would overflow, and then be like nothing."""
    by_infinity, by_least = ([1.0, 2.0, mask] for mask in (-np.inf, np.finfo(np.float64).min))
    found = fingerprint(np.array(by_least))
    assert np.isfinite(found).all()
    assert (found == fingerprint(np.array(by_infinity))).all()
