"""Two sets of tensors against each other, and against an oracle."""

import numpy as np

from lockstep.params import Arrays
from lockstep.parity.tolerances import NORM
from lockstep.parity.verdict import Finding, Verdict

SMALLEST = 32  # elements: the error of fewer is no statistic


def norm_gap(a: np.ndarray, b: np.ndarray) -> float:
    """The larger of the relative gaps in 2-norm and in maximum norm; 0 for two zeros."""
    a, b = (np.asarray(x, np.float64).ravel() for x in (a, b))
    gaps = []
    for order in (2, np.inf):
        gap, size = np.linalg.norm(a - b, order), np.linalg.norm(b, order)
        gaps.append(0.0 if gap == 0 else float(gap / size) if size else np.inf)
    return max(gaps)


def norm_rule(ours: Arrays, theirs: Arrays, bound: float = NORM.bound) -> list[Finding]:
    """Rungs 2-5 in float64: each tensor's gap, in the order given."""
    assert list(ours) == list(theirs), "both sides must name the same tensors in the same order"
    findings = []
    for name, array in ours.items():
        gap = norm_gap(array, theirs[name])
        verdict = Verdict.EQUAL if gap <= bound else Verdict.DIFFERENT  # NaN is different
        sides = f"norms {np.linalg.norm(array):.6g} and {np.linalg.norm(theirs[name]):.6g}"
        findings.append(
            Finding(
                rule="relative gap",
                where=name,
                figure=gap,
                bound=bound,
                verdict=verdict,
                detail=sides,
            )
        )
    return findings


def error_ratios(ours: Arrays, theirs: Arrays, oracle: Arrays) -> dict[str, float]:
    """|ours - oracle| / |theirs - oracle| for each tensor of at least 32 elements.

    1 where both are exact, infinite where only theirs is.
    """
    ratios = {}
    for name, truth in oracle.items():
        if truth.size >= SMALLEST:
            a, b = (
                np.linalg.norm(np.asarray(side[name], np.float64) - truth)
                for side in (ours, theirs)
            )
            ratios[name] = float(a / b) if b else 1.0 if a == 0 else np.inf
    return ratios
