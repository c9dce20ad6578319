"""Verdicts of a comparison: equal, different, or inconclusive in this configuration."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum


class Verdict(StrEnum):
    EQUAL = "equal"
    INCONCLUSIVE = "inconclusive"
    DIFFERENT = "different"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A statistic compared with its tolerance."""

    rule: str
    where: str  # the tensor or the step that the figure belongs to
    figure: float
    bound: float
    verdict: Verdict
    detail: str = ""  # both sides' figures, or what the horizon is

    @property
    def share(self) -> float:
        """Returns the figure over its tolerance; a tolerance of zero allows nothing."""
        if self.bound > 0 and not math.isnan(self.figure):
            return self.figure / self.bound
        return 0.0 if self.figure == 0 else math.inf

    def __str__(self) -> str:
        return (
            f"{self.verdict}: {self.rule} at {self.where} is {self.figure:.3g}, "
            f"tolerance {self.bound:.3g}{'; ' + self.detail if self.detail else ''}"
        )


NOTHING = Finding(rule="", where="", figure=0.0, bound=0.0, verdict=Verdict.EQUAL)


@dataclass
class Outcome:
    """The findings of one rung."""

    findings: list[Finding] = field(default_factory=list)

    @property
    def worst(self) -> Finding:
        """Returns the deciding finding: worst verdict, then the figure nearest its tolerance."""
        order = list(Verdict)
        return max(self.findings, key=lambda f: (order.index(f.verdict), f.share), default=NOTHING)

    @property
    def verdict(self) -> Verdict:
        return self.worst.verdict


def locate(where: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    return (replace(finding, where=f"{where}: {finding.where}") for finding in findings)


def median_finding(starts: list[Finding]) -> Finding:
    """Takes the middle finding of three starts: it confirms a failed comparison."""
    _, middle, _ = sorted(starts, key=lambda finding: finding.figure)
    return _of_several(middle, starts, "the median of three starts")


def agreed_finding(first: Finding, second: Finding) -> Finding:
    """Takes, of two starts with one verdict, the one nearer its tolerance.

    The median of three lies between any two of them, so a third start would change no verdict.
    """
    nearer = min((first, second), key=lambda finding: abs(finding.figure - finding.bound))
    return _of_several(nearer, [first, second], "the nearer of two starts that agree")


def _of_several(chosen: Finding, starts: list[Finding], how: str) -> Finding:
    several = f"{how}: " + ", ".join(f"{finding.figure:.3g}" for finding in starts)
    return replace(chosen, detail=f"{chosen.detail}; {several}" if chosen.detail else several)


def empty(rule: str, where: str, wrong: list[str]) -> Finding:
    """Judges a list of differences: equal if it is empty."""
    return check_bound(rule, where, len(wrong), 0, ", ".join(wrong[:3]))


def check_bound(rule: str, where: str, figure: float, bound: float, detail: str = "") -> Finding:
    """Judges a figure: equal if it is at most the bound; NaN is not."""
    verdict = Verdict.EQUAL if figure <= bound else Verdict.DIFFERENT
    return Finding(
        rule=rule, where=where, figure=float(figure), bound=float(bound), verdict=verdict,
        detail=detail,
    )  # fmt: skip
