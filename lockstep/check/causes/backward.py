"""Gradients that are wrong where the forward pass is right."""

import numpy as np

from lockstep.check.causes.evidence import Cause, Evidence
from lockstep.check.causes.glue import factor_between, name_factor
from lockstep.check.following.apart import STOPS
from lockstep.check.following.tapes import RecordedTape
from lockstep.check.roots.locate import Root
from lockstep.check.rungs import Spot
from lockstep.errors import UserError


def explain(root: Root, evidence: Evidence) -> Cause | None:
    """A constant factor, none at all, or a part that is missing."""
    spot = root.spots[0]
    if spot.ours is None or spot.theirs is None:
        return None
    ours, theirs = ([getattr(s, side) for s in root.spots] for side in ("ours", "theirs"))
    arrives, wanted = (any(x is not None and x.any() for x in each) for each in (ours, theirs))
    if wanted and not arrives:
        remedy = "look for stop_gradient, detach, or a parameter that is frozen or unused"
        module = spot.where.partition("#")[0]
        calls = [c for c in evidence.calls.names if c.partition("#")[0] == module]
        if spot.rule == "cotangent" and calls[-1:] != [spot.where]:
            text = f"no gradient arrives from a later call of {module}: what is carried is stopped"
            return Cause("stopped carry", text, remedy)
        return Cause("no gradient", "no gradient arrives here", remedy)
    if arrives and not wanted:
        if any(_cancels(each, evidence) for each in root.spots):
            root.hints.append("the reference's gradient is zero because its terms cancel")
            return None
        remedy = "stop the gradient as the reference does"
        return Cause("gradient not stopped", "the reference has no gradient here", remedy)
    factors = [factor_between(s.ours, s.theirs) for s in root.spots
               if s.ours is not None and s.theirs is not None]  # fmt: skip
    if factors[0] is not None and all(f is not None and np.isclose(f, factors[0]) for f in factors):
        name = name_factor(factors[0], spot.theirs.shape)
        return Cause("factor of a gradient",
                     f"{name} times the reference's gradient, the forward pass being right",
                     f"multiply by {1 / factors[0]:.6g}")  # fmt: skip
    return None


def _cancels(spot: Spot, evidence: Evidence) -> bool:
    """Says if a tensor of the reference has a gradient of zero, though some arrives at its uses."""
    if spot.rule != "gradient":
        return False
    try:
        reference = evidence.reference
        tape = RecordedTape(reference.about.get("tape", {}), reference.arrays)
    except UserError:
        return False
    number = tape.numbers.get(spot.where.partition("[")[0])
    stack = [number] if number in tape.cotangents else []
    while stack:
        for user in tape.users[stack.pop()]:
            if user not in tape.cotangents and tape.values[user].op not in STOPS:
                stack.append(user)
            elif user in tape.cotangents and tape.cotangents[user][3] > 0:
                return True
    return False
