"""The gate sees a changed bit, a changed result and a bug that CI no longer catches."""

from pathlib import Path

import numpy as np
import pytest

from lockstep.process import ROOT
from parity_tests import gate
from parity_tests.gate import CONFIGS, Record, differences, lost_bugs
from parity_tests.tiers import tier


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


@tier("rest", guard="the comparison, of records that are written down")
def test_a_run_with_another_rate_is_seen(tmp_path: Path) -> None:
    """Two runs of one config have the same bits; another learning rate has others."""
    config = CONFIGS["tiny"]
    first, again, other = (
        gate.train(ROOT, tmp_path / str(number), f"{config}{more}", "fp64", "torch")
        for number, more in enumerate(("", "", " --lr 0.0019"))
    )
    assert first.tensors and not [*differences(first, again)]
    assert any("loss" in line for line in differences(first, other))
    assert any("weights/" in line for line in differences(first, other))
