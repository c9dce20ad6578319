"""The gate sees a changed bit, a changed result and a bug that CI no longer catches."""

import numpy as np
import pytest

from parity_tests import gate
from parity_tests.gate import Record, differences, lost_bugs


def record() -> Record:
    weights = np.arange(1, 5, dtype=np.float64)
    return Record({"train 1 loss": 2.0}, {"weights/embed.weight": weights})


@pytest.mark.parametrize("factor", [1.0, 1 + 2**-52, np.nan, -1.0])
def test_a_changed_tensor_is_seen(factor: float) -> None:
    changed = record()
    changed.tensors["weights/embed.weight"] = record().tensors["weights/embed.weight"] * factor
    assert bool([*differences(record(), changed)]) == (factor != 1)


def test_a_lost_bug_is_seen() -> None:
    before = {"twin: a": "make test", "twin: b": "--rest", "twin: c": "lockstep power alone"}
    assert not [*lost_bugs(before, before | {"twin: a": "--rest"})]
    assert len([*lost_bugs(before, {"twin: a": "--full", "twin: b": "make test"})]) == 1
    assert len([*lost_bugs(before, {})]) == 2
    assert not [*lost_bugs(dict.fromkeys(gate.RETIRED, "make test"), {})]
