"""Which rule each side's initial values follow."""

import math

from lockstep.check.causes.evidence import Cause, Evidence
from lockstep.check.locate import Root


def explain(root: Root, evidence: Evidence) -> Cause | None:
    """Names the rules of the first tensor; the others are listed with their own figures."""
    initial = evidence.reference.about["initial"]
    spot = root.largest if root.largest.figure < math.inf else root.spots[0]
    entry = next((e for e in evidence.entries if str(e.reference) == spot.where), None)
    if entry is None or entry.reference.name not in initial:
        return None
    theirs = initial[entry.reference.name]
    ours = entry.port.take(evidence.port.initial)
    said = [rule_of(std, ours.size, entry.shape) for std in (float(ours.std()), theirs["std"])]
    if not all(said) or said[0] == said[1]:
        return None
    return Cause(
        "initial values", f"{spot.where}: {said[0]}, for {said[1]}", f"initialise with {said[1]}"
    )


def rule_of(std: float, n: int, shape: tuple[int, ...]) -> str:
    """The rule that gives this standard deviation, within five sampling errors; "" where none does,
    or where so few numbers do not tell two rules apart of which one gives twice the other's."""
    if std < 1e-12:
        return "a constant"
    rules = {"normal(0.02)": 0.02, "normal(1)": 1.0, "normal(0.01)": 0.01}
    if len(shape) >= 2:
        out, fan = shape[0], math.prod(shape[1:])
        rules |= {
            f"LeCun's 1/sqrt({fan})": fan**-0.5, f"He's sqrt(2/{fan})": (2 / fan) ** 0.5,
            f"Glorot's sqrt(2/{fan + out})": (2 / (fan + out)) ** 0.5,
            f"torch's uniform 1/sqrt(3 * {fan})": (3 * fan) ** -0.5,
            f"1/sqrt({out})": out**-0.5,
        }  # fmt: skip
    error = 5 * (1 / (2 * n)) ** 0.5
    off, name = min((abs(math.log(std / value)), name) for name, value in rules.items())
    return name if off <= error < math.log(2) / 2 else ""
