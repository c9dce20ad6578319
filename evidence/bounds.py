"""Whether the bounds that a row was judged by are still the code's."""

from collections.abc import Iterable, Iterator
from typing import Any

from lockstep.config.policy import POLICIES
from lockstep.judge import tolerances
from lockstep.judge.tolerances import Tolerance

# Rule -> its constant in `tolerances`.
NAMES = {
    "relative gap": "NORM", "gap of the losses, in nats": "CURVE",
    "gap of the gradient norms": "CURVE_NORM", "gap over envelope": "ENVELOPE",
    "gap over noise": "NOISE", "noise over noise": "SENSITIVITY",
}  # fmt: skip
BY_POLICY = (
    "tapped against trained",
    "gap to what keeps everything",
)  # the norm rule, or the noise


def of_rule(rule: str, policy: str) -> set[float]:
    """What today's code may judge by; of a rule that is not listed, any of its bounds."""
    if rule.startswith("bytes of "):
        return {tolerances.MEMORY[rule.split()[2]].bound}
    if rule in BY_POLICY:
        exact = POLICIES[policy].compute == "float64"
        return {(tolerances.NORM if exact else tolerances.NOISE).bound}
    if rule not in NAMES:
        return {0.0, *(each.bound for each in _flat(vars(tolerances).values()))}
    return {getattr(tolerances, NAMES[rule]).bound}


def _flat(values: Iterable[Any]) -> Iterator[Tolerance]:
    for value in values:
        if isinstance(value, Tolerance):
            yield value
        elif isinstance(value, dict):
            yield from _flat(value.values())


def of_row(row: dict[str, Any]) -> dict[str, float]:
    """Rule -> the bound that a row of the ladder or of the specificity says it was judged by."""
    worst = row.get("worst", {})
    found = {worst["rule"]: worst} if "rule" in worst else worst
    return {rule: each["bound"] for rule, each in found.items()}


def outdated(rows: Iterable[dict[str, Any]]) -> dict[str, list[str]]:
    """Row -> the rules that it was judged by under another bound than today's, and both."""
    found: dict[str, list[str]] = {}
    for row in rows:
        for rule, recorded in of_row(row).items():
            today = of_rule(rule, row["policy"])
            if recorded not in today:
                now = " or ".join(f"{each:g}" for each in sorted(today))
                found.setdefault(row["name"], []).append(f"{rule} {recorded:g}, now {now}")
    return found


def remark(rows: list[dict[str, Any]]) -> str:
    """What a table of these rows has to say of their bounds; empty if they are today's."""
    found = outdated(rows)
    if not found:
        return ""
    rules = dict.fromkeys(rule for each in found.values() for rule in each)
    return (f"**Recorded under other bounds than the code's: {len(found)} of {len(rows)} rows** "
            f"({'; '.join(rules)}).")  # fmt: skip
