"""No bound is tighter than what correct programs were seen to reach, over many seeds."""

import pytest

from lockstep import results
from lockstep.config.policy import POLICIES
from lockstep.parity import tolerances
from lockstep.parity.tolerances import CURVE, CURVE_NORM, ENVELOPE, MEDIAN, NORM, RATIO, SAME
from lockstep.process import ROOT

RESULTS = ROOT / "docs" / "results"
ROWS = results.read(RESULTS / "specificity.jsonl", "cpu")
SEEDS = 20  # at least, and 50 for the curves


def bound(rule: str, policy: str, recorded: float) -> float:
    """Today's, of a rule that `lockstep specificity` has a figure of."""
    compute = POLICIES[policy].compute
    if rule.startswith("bytes of"):
        return tolerances.MEMORY[rule.split()[2]].bound
    of_rule: dict[str, float] = {
        "relative gap": NORM.bound,
        "gap of the losses, in nats": CURVE.bound,
        "gap of the gradient norms": CURVE_NORM.bound,
        "gap over envelope": ENVELOPE.bound,
        "tapped against trained": SAME[compute].bound,
        "gap to what keeps everything": SAME[compute].bound,
    }
    if rule in of_rule:
        return of_rule[rule]
    if rule == "median error ratio":
        return MEDIAN[compute].bound
    if rule == "error ratio":  # what comes before the first matmul is float32
        return RATIO["float32" if recorded == RATIO["float32"].bound else compute].bound
    return 0.0  # the rest allow nothing


FIGURES = [
    pytest.param(rule, row["policy"], worst, id=f"{name}-{rule}")
    for name, row in ROWS.items()
    for rule, worst in row["worst"].items()
]


@pytest.mark.parametrize(("rule", "policy", "held"), FIGURES)
def test_the_worst_figure_is_within_today_s_bound(
    rule: str, policy: str, held: dict[str, float]
) -> None:
    assert held["figure"] <= bound(rule, policy, held["bound"])


def test_so_is_that_of_the_whole_matrix() -> None:
    """Which may have been run when bounds were wider."""
    rows = results.read(RESULTS / "parity.jsonl", "cpu").values()
    worst = [(row["policy"], row["worst"]) for row in rows if row["cases"]]
    assert len(worst) >= 4 * 9
    for policy, held in worst:
        assert held["figure"] <= bound(held["rule"], policy, held["bound"]), (policy, held)


def test_enough_seeds_were_climbed() -> None:
    assert {row["part"] for row in ROWS.values()} == {"fp64", "fp32", "bf16", "fp16", "rewrites"}
    for name, row in ROWS.items():
        if row["part"] != "rewrites":
            least = 50 if row["rung"] == 8 and row["part"] != "fp64" else SEEDS
            assert row["climbs"] >= least, name


def test_every_bound_has_a_reason_and_a_figure() -> None:
    found = [
        tolerance
        for value in vars(tolerances).values()
        for tolerance in (value.values() if isinstance(value, dict) else [value])
        if isinstance(tolerance, tolerances.Tolerance)
    ]
    assert len(found) > 15
    assert all(tolerance.reason and tolerance.measured for tolerance in found)
