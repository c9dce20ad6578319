"""A claim, what was found of it, and the verdict."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.claims.results import Missing, Results

NOT_HERE = "not measured here"


class Finding(NamedTuple):
    said: str  # the measured figures
    held: dict[str, bool]  # framework -> whether the claim holds in it


@dataclass(frozen=True, kw_only=True)
class Claim:
    what: str
    source: str
    judge: Callable[[Results], Finding] | None = None  # None: it cannot be measured
    needs: str = ""  # for want of which


def row(claim: Claim, results: Results) -> list[str]:
    """Claim, source, what was measured, verdict."""
    if claim.judge is None:
        return [claim.what, claim.source, "", f"{NOT_HERE} (needs: {claim.needs})"]
    try:
        finding = claim.judge(results)
    except Missing as missing:
        return [claim.what, claim.source, "", f"{NOT_HERE} ({missing})"]
    return [claim.what, claim.source, finding.said, verdict(finding)]


def verdict(finding: Finding) -> str:
    yes = [framework for framework, held in finding.held.items() if held]
    no = [framework for framework, held in finding.held.items() if not held]
    if yes and no:
        return f"holds in {', '.join(yes)}, not in {', '.join(no)}"
    return "holds" if yes else "**does not hold**"


def markdown(claims: list[Claim], results: Results) -> str:
    head = ["claim", "from", "measured here", "verdict"]
    lines = [head, ["---"] * len(head), *(row(claim, results) for claim in claims)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
