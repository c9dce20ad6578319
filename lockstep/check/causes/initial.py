"""Which rule each side's initial values follow."""

import math

import numpy as np

from lockstep.check.causes.evidence import Cause, Evidence
from lockstep.check.layout import Piece
from lockstep.check.roots.locate import Root
from lockstep.model.params import Arrays
from lockstep_recorder.recording import moments

UNIFORM, NORMAL = 1.8, 3.0  # kurtosis


def explain(root: Root, evidence: Evidence) -> Cause | None:
    """Names the rules of the first tensor; the others are listed with their own figures."""
    initial = evidence.reference.about["initial"]
    spot = root.largest if root.largest.figure < math.inf else root.spots[0]
    pieces = {(str(e.reference), str(e.port)): (e.reference, e.port) for e in evidence.entries}
    whole = Piece(spot.where), Piece(spot.port)
    r, p = pieces.get((spot.where, spot.port), whole)
    if r.name not in initial or p.name not in evidence.port.initial:
        return None
    theirs, ours = _drawn(r, evidence.reference.weights), _drawn(p, evidence.port.initial)
    drawn = moments(ours), initial[r.name]
    frameworks = evidence.framework, evidence.reference.about["framework"]
    said = [rule_of(each["std"], x.shape, framework, each["kurtosis"])
            for each, x, framework in zip(drawn, (ours, theirs), frameworks)]  # fmt: skip
    if not all(said) or said[0] == said[1]:
        return None
    return Cause(
        "initial values", f"{spot.where}: {said[0]}, for {said[1]}", f"initialise with {said[1]}"
    )


def _drawn(piece: Piece, arrays: Arrays) -> np.ndarray:
    """Returns what was drawn at once: a tensor, or one layer of a stack."""
    stacked = any(cut.index for cut in piece.cuts)
    return piece.take(arrays) if stacked else arrays[piece.name]


def rule_of(std: float, shape: tuple[int, ...], framework: str, kurtosis: float = UNIFORM) -> str:
    """The rule that gives this standard deviation, within five sampling errors; "" where none does,
    where another is as good as within two, or where so few numbers do not tell two rules apart of
    which one gives twice the other's.

    Args:
        framework: torch has what a layer gives in the first axis, JAX in the last.
        kurtosis: of a uniform rule it is a uniform variable's, not a normal one's.
    """
    if std < 1e-12:
        return "a constant"
    rules = {"normal(0.02)": 0.02, "normal(1)": 1.0, "normal(0.01)": 0.01}
    if len(shape) >= 2:
        out, *given = shape if framework == "torch" else shape[::-1]
        fan = math.prod(given)
        rules |= {
            f"LeCun's 1/sqrt({fan})": fan**-0.5, f"He's sqrt(2/{fan})": (2 / fan) ** 0.5,
            f"Glorot's sqrt(2/{fan + out})": (2 / (fan + out)) ** 0.5,
            f"torch's uniform 1/sqrt(3 * {fan})": (3 * fan) ** -0.5,
            f"1/sqrt({out})": out**-0.5,
        }  # fmt: skip
        if kurtosis > (UNIFORM + NORMAL) / 2:
            del rules[f"torch's uniform 1/sqrt(3 * {fan})"]
    error = (1 / (2 * math.prod(shape))) ** 0.5
    off, name = min((abs(math.log(std / value)), name) for name, value in rules.items())
    others = [value for value in rules.values() if not math.isclose(value, rules[name])]
    alone = all(abs(math.log(std / value)) > 2 * error for value in others)
    return name if alone and off <= 5 * error < math.log(2) / 2 else ""
