"""The growth laws hold for us, and each can fail."""

import math
from typing import Any

import numpy as np
import pytest

import torch_ref.model
from benchmarks import laws
from benchmarks.laws import Law, Twins
from parity_tests.tiers import tier

DEPTHS = (4, 9, 16, 36)
SMALL = {"context": 16, "d_model": 16}


def broken_laws() -> list[str]:
    twins = Twins("torch", "cpu")
    kept: dict[str, laws.Curve] = {
        mode: (DEPTHS, [twins.residuals(n_layer=n, remat=mode, **SMALL) for n in DEPTHS])
        for mode in laws.SHAPES
    }
    found = laws.depth(kept)
    assert len(found) == 5
    return [law.what for law in found if not law.holds]


@tier("rest", guard="rung 6, and its bug sqrt-runs-block")
def test_memory_follows_depth_and_sqrt_that_runs_block_breaks_two_laws(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert broken_laws() == []
    right = torch_ref.model.through_blocks
    monkeypatch.setattr(
        torch_ref.model, "through_blocks",
        lambda *args, remat: right(*args, remat="block" if remat == "sqrt" else remat),
    )  # fmt: skip
    wrong = broken_laws()
    assert "remat sqrt keeps less than block from 16 layers" in wrong
    assert any("fit" in what or "each sqrt" in what for what in wrong)


@tier("rest", guard="rung 6, and its bug sqrt-runs-block")
def test_jax_keeps_less_with_sqrt() -> None:
    twins = Twins("jax", "cpu")
    block, sqrt = (twins.residuals(n_layer=16, remat=mode, **SMALL) for mode in ("block", "sqrt"))
    assert sqrt < block


@tier("rest", guard="FLOPs of remat, in test_cost.py")
@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_recomputed_flops(framework: str) -> None:
    twins = Twins(framework, "cpu")
    flops = {
        mode: float(twins.flops(n_layer=9, remat=mode, layers="unroll", **SMALL))
        for mode in laws.SHAPES
    }
    found = laws.ratios("FLOPs", flops, laws.FLOPS)
    assert all(law.holds and law.figure > 1.1 for law in found)


def test_fits() -> None:
    x = [4.0, 9, 16, 36, 64]
    line = laws.fit(x, [3 + 2 * math.sqrt(n) for n in x], np.sqrt)
    assert (line.a, line.b) == (pytest.approx(3), pytest.approx(2))
    assert line.residual < 1e-12
    assert laws.fit(x, [3 + 2 * n for n in x], np.sqrt).residual > laws.WORST_RESIDUAL


@pytest.mark.parametrize(("bytes", "holds"), [([10.0, 18, 18], True), ([10.0, 20, 30], False)])
def test_accumulation_is_flat_to_one_copy_of_the_gradients(bytes: Any, holds: bool) -> None:
    assert laws.flat(((1, 2, 4), bytes), gradients=8).holds is holds


def test_what_does_not_hold_is_said() -> None:
    found = [
        Law(what="a", said="", figure=2.0, bound=1.0),
        Law(what="b", said="", figure=2.0, bound=1.0, binding=False),
        Law(what="c", said="", figure=math.nan, bound=1.0),
    ]
    rows = laws.table({"laws": [vars(law) for law in found]}).splitlines()[2:]
    assert ["does not hold" in row for row in rows] == [True, False, True]
