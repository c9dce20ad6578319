"""Two sets of tensors against each other, and against an oracle."""

import numpy as np

from lockstep.model.params import Arrays
from lockstep.model.state import TrainState
from lockstep.parity.tolerances import FLOAT32_ERROR, MEDIAN, NORM, RATIO
from lockstep.parity.verdict import Finding, Verdict, within

SMALLEST = 32  # elements: the error of fewer is no statistic


def norm_gap(a: np.ndarray, b: np.ndarray) -> float:
    """The larger of the relative gaps in 2-norm and in maximum norm; 0 for two zeros."""
    a, b = (np.asarray(x, np.float64).ravel() for x in (a, b))
    gaps = []
    for order in (2, np.inf):
        gap, size = np.linalg.norm(a - b, order), np.linalg.norm(b, order)
        gaps.append(0.0 if gap == 0 else float(gap / size) if size else np.inf)
    return max(gaps)


def norm_rule(ours: Arrays, theirs: Arrays, *, bound: float = NORM.bound) -> list[Finding]:
    """In float64: each tensor's gap, in the order given."""
    assert list(ours) == list(theirs), "both sides must name the same tensors in the same order"
    return [
        within(
            "relative gap",
            name,
            norm_gap(array, theirs[name]),
            bound,
            f"norms {np.linalg.norm(array):.6g} and {np.linalg.norm(theirs[name]):.6g}",
        )
        for name, array in ours.items()
    ]


def gaps(ours: Arrays, theirs: Arrays) -> tuple[str, float]:
    """The tensor with the largest gap, and that gap; NaN counts as infinite."""
    each = {name: norm_gap(x, theirs[name]) for name, x in ours.items()}
    name = max(each, key=lambda n: np.inf if np.isnan(each[n]) else each[n])
    return name, each[name]


def stacked(sets: list[Arrays]) -> Arrays:
    """The tensors of several batches under one name, so that a norm is taken over all."""
    return {name: np.stack([arrays[name] for arrays in sets], axis=-1) for name in sets[0]}


def changed(before: TrainState, after: TrainState) -> list[str]:
    """The tensors whose values are no longer the same."""
    return [
        f"{field} {name}"
        for field in ("params", "mu", "nu")
        for name, array in getattr(before, field).items()
        if not np.array_equal(array, getattr(after, field)[name])
    ]


def error_ratios(ours: Arrays, theirs: Arrays, oracle: Arrays) -> dict[str, float]:
    """|ours - oracle| / |theirs - oracle| of each tensor with at least 32 elements a batch.

    The last axis is that of the batches, (..., K): the geometric mean of their ratios, so that no
    batch with a large gradient speaks for all. 1 where both are exact, infinite where only theirs.
    """
    ratios = {}
    for name, truth in oracle.items():
        if truth[..., 0].size >= SMALLEST:
            a, b = (
                np.linalg.norm(_columns(side[name]) - _columns(truth), axis=0)
                for side in (ours, theirs)
            )
            with np.errstate(divide="ignore", invalid="ignore"):
                each = np.where(a == b, 1.0, a / b)  # also 0 / 0
                ratios[name] = float(np.exp(np.log(each).mean()))
    return ratios


def _columns(x: np.ndarray) -> np.ndarray:
    """(..., K) -> float64 (elements, K)"""
    return np.asarray(x, np.float64).reshape(-1, x.shape[-1])


def ratio_rule(
    oracle: Arrays, ours: Arrays, theirs: Arrays, *, compute: str, slack: float = 1.0
) -> list[Finding]:
    """In lower precision: neither is farther from the truth than the other, by much.

    `slack` widens the bounds where one of the two is expected to be closer.
    """
    assert list(ours) == list(theirs) == list(oracle), "the same tensors in the same order"
    ratios = error_ratios(ours, theirs, oracle)
    findings = []
    for name, ratio in ratios.items():
        # What comes before the first matmul of the compute dtype is float32 under every policy.
        wide = max(norm_gap(side[name], oracle[name]) for side in (ours, theirs)) < FLOAT32_ERROR
        bound = RATIO["float32" if wide else compute].bound * slack
        findings.append(within("error ratio", name, _fold(ratio), bound, f"{ratio:.3g}"))
    middle = float(np.median(list(ratios.values())))
    where, bound = f"all {len(ratios)} tensors", MEDIAN[compute].bound * slack
    return [*findings, within("median error ratio", where, _fold(middle), bound, f"{middle:.3g}")]


def _fold(ratio: float) -> float:
    """Twice as far off or half as far off is the same figure."""
    return max(ratio, 1 / ratio if ratio else np.inf)


def worst(findings: list[Finding]) -> Finding:
    """The finding that decides: the most damning verdict, then the figure nearest its bound."""
    order = list(Verdict)
    return max(findings, key=lambda f: (order.index(f.verdict), f.share))
