"""Tables: which cells may stand in one, and that each bound can be missed."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import cells, ladder, measure, published, report
from benchmarks.report import EXACT, HALF, SINGLE, final_loss
from lockstep import results
from lockstep.config.policy import POLICIES
from lockstep.judge.tolerances import Tolerance
from lockstep.process import ROOT
from lockstep.train import autotune
from parity_tests.conftest import Outcomes

QUICK: dict[str, Any] = {
    "model": "gpt2", "n_layer": 1, "n_head": 1, "d_model": 8, "context": 8, "vocab": 256,
    "batch_size": 2, "policy": "fp32",
}  # fmt: skip


def measurement(**changed: Any) -> dict[str, Any]:
    return dict.fromkeys(results.MEASURED) | {"device": "cpu", "versions": {"numpy": "2"}} | changed


def result(contender: str = "torch", accum: int = 1, **changed: Any) -> dict[str, Any]:
    flags = {**QUICK, "accum": accum}
    given = cells.Cell(table="t", contender=contender, flags=flags, windows=2, steps=1)
    return {
        "cell": {**vars(given)}, "config": given.config.to_json(), "status": "ok",
        "name": given.name, "about": {"device": "cpu"}, "measured": measurement(),
        "seconds": {"compile": 1.0, "first step": 1.0}, "seconds_per_step": [0.5, 1.0, 2.0],
        "tokens_per_second": 16.0, "quartiles": [8.0, 32.0], "mfu": None, "peak_bytes": 2**20,
        "reserved_bytes": None, "predicted_bytes": 2**21, "final_loss": 4.0, "loss_scale": 1.0,
        **changed,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"final_loss": 4.1}, "part by 0.1"),
        ({"final_loss": 4.0002}, "more than 0.0001"),
        ({"final_loss": float("nan")}, "did not compute the same"),
        ({"about": {"device": "another"}}, "different devices"),
        ({"measured": measurement(device="cuda")}, "different devices"),
        ({"measured": measurement(versions={"numpy": "3"})}, "different versions"),
    ],
)
def test_what_cannot_be_compared_is_refused(changed: dict[str, Any], why: str) -> None:
    text = report.table([result(), result(contender="jax", **changed)])
    assert text.startswith("Refused: ") and why in text
    assert "|" not in text


def test_what_computed_the_same_or_does_other_work_stands_in_one_table() -> None:
    same, other = result(contender="jax", final_loss=4.00005), result(accum=2, final_loss=3.0)
    assert "Refused" not in report.table([result(), same, other])


@pytest.mark.parametrize(("policy", "bound"), [("fp32", SINGLE), ("bf16", HALF)])
def test_the_bound_on_final_losses_is_a_few_times_what_was_seen(
    policy: str, bound: Tolerance
) -> None:
    """At every step of the suite `drift`, not at its end alone."""
    seen = results.read(ROOT / "benchmarks" / "results" / "drift.jsonl").values()
    losses = [r["losses"] for r in seen if r["config"]["precision"]["policy"] == policy]
    assert len(losses) >= 2
    worst = max(max(step) - min(step) for step in zip(*losses, strict=True))
    assert bound.bound / 20 < worst < bound.bound / 3


def test_tf32_is_held_as_half_precision_is() -> None:
    found = {name: final_loss(POLICIES[name]) for name in ("tf32", "fp16", "fp8", "fp32", "fp64")}
    assert list(found.values()) == [HALF, HALF, HALF, SINGLE, EXACT]


# --- races


def race(ratio: float, noise: float, pairs: int = 20) -> dict[str, float]:
    generator = np.random.Generator(np.random.Philox(3))
    drift = 1 + 0.5 * np.linspace(0, 1, pairs)
    return autotune.interval([
        (d * math.exp(generator.normal(0, noise)), d * ratio * math.exp(generator.normal(0, noise)))
        for d in drift
    ])  # fmt: skip


def test_drift_and_a_burst_are_no_difference_and_noise_widens_the_interval() -> None:
    exact, noisy = race(1.0, 0.0), race(1.0, 0.05)
    assert exact == {"speed": 1.0, "low": 1.0, "high": 1.0}
    assert noisy["low"] < 1 < noisy["high"] and noisy["high"] - noisy["low"] > 0.02
    turns = [(1.0, 1.0)] * 19
    assert autotune.interval([*turns, (30.0, 1.0)]) == autotune.interval([*turns, (1.0, 1.0)])


def test_the_interval_is_one_of_95_percent() -> None:
    """By the binomial distribution: values outside it on each side, of a median known to be 0."""
    generator = np.random.Generator(np.random.Philox(4))
    for n in (20, 25, 60):
        drawn = np.sort(generator.normal(size=(20_000, n)), axis=1)
        edge = autotune.outside(n)
        covered = ((drawn[:, edge] < 0) & (drawn[:, -1 - edge] > 0)).mean()
        wider = ((drawn[:, edge + 1] < 0) & (drawn[:, -2 - edge] > 0)).mean()
        assert wider < 0.955 and 0.945 < covered < 0.98, n


# --- the ladder


def test_a_failed_rung_is_never_called_equal(tmp_path: Path) -> None:
    """Its row is there as soon as the rung has ended."""
    file = tmp_path / "rungs.jsonl"
    options = {"--device": "cuda", "--status": str(file)}
    config: Any = SimpleNamespace(getoption=options.get, option=SimpleNamespace())
    outcomes = Outcomes(config)
    where = '"rung": 3, "policy": "bf16", "row": "a"'
    worst = '"worst": {"figure": 1.0, "bound": 2.0, "rule": "r"}'
    texts = ('"verdict": "equal", ' + worst, '"verdict": "failed", "why": "RuntimeError: x"',
             '"verdict": "different", ' + worst)  # fmt: skip
    verdicts = []
    for text in texts:
        given: Any = SimpleNamespace(
            user_properties=[("outcome", f"{{{where}, {text}}}")], when="call", duration=1.0
        )
        outcomes.pytest_runtest_logreport(given)
        (row,) = results.read(file).values()
        verdicts.append(row["verdict"])
    assert verdicts == ["equal", "failed", "failed"] and row["cases"] == 3
    assert "failed: a: RuntimeError: x" in ladder.status({"bf16 3": row})
    alone = {name: value for name, value in row.items() if name != "worst"}
    assert "| `bf16` | 0 of 1 |  |  |" in ladder.policies({"bf16 3": alone})
    assert "rung 3: failed, a: RuntimeError: x |" in report.describe({"bf16 3": row})


def test_rows_judged_by_other_bounds_are_equal_by_today_s() -> None:
    """The page says how many there are, and both bounds; a recorded row is not judged anew."""
    rows = results.read(ROOT / "docs/results/parity.jsonl")
    outdated = ladder.find_outdated(rows.values())
    for name in outdated:
        worst, policy, rung = (rows[name][field] for field in ("worst", "policy", "rung"))
        assert worst["figure"] <= min(ladder.bounds_of(worst["rule"], policy, rung)), name
    said = ladder.with_remark(lambda rows: "a table", rows)
    begin = f"a table\n\n**Recorded under other bounds than the code's: {len(outdated)} of "
    assert said.startswith(begin)
    current = {name: row for name, row in rows.items() if name not in outdated}
    assert ladder.with_remark(lambda rows: "a table", current) == "a table"


def test_recorded_gpu_rows_are_steady() -> None:
    """A row whose windows spread by more is rejected by the runner, so none is recorded."""
    rows = [row for file in published.MEASURED for row in results.read(file).values()]
    timed = [row["seconds_per_step"] for row in rows if "seconds_per_step" in row]
    assert len(timed) > 80
    assert [seconds for seconds in timed if measure.reject_unsteady(seconds)] == []
    rejected = measure.reject_unsteady([0.096, 0.095, 0.114, 0.108, 0.153])
    assert rejected["status"] == measure.UNSTEADY and "spread by 17%" in rejected["why"]
