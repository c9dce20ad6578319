"""The growth laws and the race: they hold for us, and each can fail."""

import math
from typing import Any

import numpy as np
import pytest

import torch_ref.model
from benchmarks import growth, laws, speed
from benchmarks.growth import Measure
from benchmarks.laws import Curve, Law
from parity_tests.tiers import tier

DEPTHS = (4, 9, 16, 36)
SMALL = {"context": 16, "d_model": 16}


def kept_curves(measure: Measure) -> dict[str, Curve]:
    return {
        mode: (DEPTHS, [measure.residuals(n_layer=n, remat=mode, **SMALL) for n in DEPTHS])
        for mode in growth.MODES
    }


def broken(found: list[Law]) -> list[str]:
    return [law.what for law in found if not law.holds]


@tier("rest", guard="rung 6, and its bug sqrt-runs-block")
def test_memory_follows_depth() -> None:
    found = laws.depth(kept_curves(Measure("torch", "cpu")))
    assert len(found) == 5 and broken(found) == []


@tier("rest", guard="rung 6, and its bug sqrt-runs-block")
def test_sqrt_that_runs_block_breaks_two_laws(monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch_ref.model.through_blocks
    monkeypatch.setattr(
        torch_ref.model, "through_blocks",
        lambda *args, remat: right(*args, remat="block" if remat == "sqrt" else remat),
    )  # fmt: skip
    wrong = broken(laws.depth(kept_curves(Measure("torch", "cpu"))))
    assert "remat sqrt keeps less than block from 16 layers" in wrong
    assert any("fit" in what or "each sqrt" in what for what in wrong)


@tier("rest", guard="rung 6, and its bug sqrt-runs-block")
def test_jax_keeps_less_with_sqrt() -> None:
    measure = Measure("jax", "cpu")
    block, sqrt = (measure.residuals(n_layer=16, remat=mode, **SMALL) for mode in ("block", "sqrt"))
    assert sqrt < block


@tier("rest", guard="FLOPs of remat, in test_cost.py")
@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_recomputed_flops(framework: str) -> None:
    measure = Measure(framework, "cpu")
    flops = {
        mode: measure.flops(n_layer=9, remat=mode, layers="unroll", **SMALL)
        for mode in growth.MODES
    }
    found = laws.ratios("FLOPs", flops.pop("none"), dict(flops), laws.FLOPS)
    assert len(found) == len(growth.MODES) - 1 and broken(found) == []
    assert all(law.figure > 1.1 for law in found)


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
    rows = laws.table({"laws": [law.to_json() for law in found]}).splitlines()[2:]
    assert ["does not hold" in row for row in rows] == [True, False, True]
    assert [Law.from_json(law.to_json()) for law in found[:2]] == found[:2]


# --- the race


def races(ratio: float, noise: float, pairs: int = 20) -> dict[str, float]:
    generator = np.random.Generator(np.random.Philox(3))
    drift = 1 + 0.5 * np.linspace(0, 1, pairs)
    return speed.interval([
        (d * math.exp(generator.normal(0, noise)), d * ratio * math.exp(generator.normal(0, noise)))
        for d in drift
    ])  # fmt: skip


def test_drift_is_no_difference_and_noise_widens_the_interval() -> None:
    exact, noisy = races(1.0, 0.0), races(1.0, 0.05)
    assert exact == {"speed": 1.0, "low": 1.0, "high": 1.0}
    assert noisy["low"] < 1 < noisy["high"] and noisy["high"] - noisy["low"] > 0.02


def test_a_burst_in_one_turn_says_nothing() -> None:
    turns = [(1.0, 1.0)] * 19
    assert speed.interval([*turns, (30.0, 1.0)]) == speed.interval([*turns, (1.0, 1.0)])


def test_the_interval_is_one_of_95_percent() -> None:
    """By the binomial distribution: values outside it on each side, of a median known to be 0."""
    generator = np.random.Generator(np.random.Philox(4))
    for n in (20, 25, 60):
        drawn = np.sort(generator.normal(size=(20_000, n)), axis=1)
        edge = speed.outside(n)
        covered = ((drawn[:, edge] < 0) & (drawn[:, -1 - edge] > 0)).mean()
        wider = ((drawn[:, edge + 1] < 0) & (drawn[:, -2 - edge] > 0)).mean()
        assert wider < 0.955 and 0.945 < covered < 0.98, n


@pytest.mark.parametrize(("ratio", "holds"), [(1.0, True), (0.96, False)])
def test_the_floor_is_held_against_the_lower_end(ratio: float, holds: bool) -> None:
    result = {"floor": speed.LEVEL, "name": "x", "seconds": [0], **races(ratio, 0.005)}
    assert speed.holds(result) is holds
    assert ("falls short" in speed.markdown([result])) is not holds
    assert speed.holds({**result, "floor": None})


@tier("rest", guard="the laws, of given times")
def test_a_racer_answers_with_seconds() -> None:
    racer = speed.Racer("torch", "fp32", speed.SMALL | {"n_layer": 1, "d_model": 24, "context": 8})
    assert racer.turn() > 0
    racer.close()
    assert racer.process.returncode == 0
