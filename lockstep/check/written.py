"""Differences of two programs as they are written, which their runs in float64 leave out."""

from collections import Counter
from typing import Any

from lockstep.check.roots.locate import Root
from lockstep.check.rungs import Stage
from lockstep.check.sides.modules import Calls, is_one_value
from lockstep_recorder.noise import ULPS

Facts = dict[str, Any]


def compare_whole_numbers(reference: Facts, port: Facts, rung: Stage) -> list[Root]:
    """Returns a root, whose finding it adds to a rung, if whole numbers leave their formats on one
    side alone: here they are int64 on both, which JAX ordinarily has not, nor a batch of uint8."""
    sides = {"reference": reference.get("wraps", []), "port": port.get("wraps", [])}
    wrapping = [(side, places) for side, places in sides.items() if places]
    if len(wrapping) != 1:
        return []
    side, places = wrapping[0]
    root = _root(rung, "whole numbers", places[0], 1.0, 0.0)
    root.entry = "whole numbers"
    root.cause = f"they overflow in the {side} as it is written, and are int64 here: {places[0]}"
    root.remedy = "compute them in a wider format, or in floats"
    return [root]


def compare_as_written(reference: Facts, port: Facts, rung: Stage) -> tuple[list[Root], list[Root]]:
    """Returns roots, whose findings it adds to a rung: what the port alone computes in a narrower
    format, though both sides' products have one; and where it alone drops out in evaluation, which
    stands beside the verdict, for dropout is switched off.

    Args:
        reference: what its recording says of it; a trace of before may lack this.
        port: likewise.
    """
    theirs, ours = (facts.get("written") or {} for facts in (reference, port))
    if not (theirs and ours):
        return [], []
    roots, beside = [], []
    for kind, (dtype, line) in sorted(ours["delicate"].items()):
        usual = theirs["delicate"].get(kind, [theirs["products"]])[0]
        if theirs["products"] == ours["products"] and ULPS[dtype] > ULPS[usual]:
            root = _root(rung, kind, line, ULPS[dtype], ULPS[usual])
            root.entry, root.cause = "rounding", f"in {dtype}, for {usual}: {line}"
            root.remedy = f"compute the {kind} in {usual}"
            roots.append(root)
    if ours["drops_always"] and not theirs["drops"]:
        line = ours["drops_always"][0]
        root = _root(Stage(number=rung.number, name=""), "dropout", line, 1.0, 0.0)
        root.entry, root.cause = (
            "dropout",
            f"on in evaluation, too, where the reference has none: {line}",
        )
        root.remedy = "switch it off in evaluation: F.dropout(x, p, training=self.training)"
        beside.append(root)
    return roots, beside


def _root(rung: Stage, what: str, line: str, figure: float, bound: float) -> Root:
    where = f"{what} at {line.partition('  ')[0]}"
    rung.add("as written", where, figure, bound)
    spot = rung.spots[-1]
    return Root(rung.number, where, "forward", [spot], [where], spot)


def compare_dropout(reference: Facts, port: Facts, theirs: Calls, ours: Calls) -> list[str]:
    """Tells where dropout differs, which is switched off here: its rates, and its places as far as
    modules show what they are given."""
    sides = [(facts.get("written") or {}).get("rates", {}) for facts in (reference, port)]
    if sorted(sides[0].values()) != sorted(sides[1].values()):
        said = [", ".join(f"{n} times {rate:g}" for rate, n in sorted(Counter(x.values()).items()))
                or "none" for x in sides]  # fmt: skip
        return [f"dropout, which is off here: {said[0]} in the reference, {said[1]} in the port"]
    values = [
        [
            (rate, calls.arrays[f"in/{place}"])
            for place, rate in rates.items()
            if f"in/{place}" in calls.arrays
        ]
        for rates, calls in zip(sides, (theirs, ours))
    ]
    if not len(values[0]) == len(values[1]) == len(sides[0]):
        return []  # functions, whose place no module shows
    for rate, x in values[0]:
        if not any(rate == other and is_one_value(y, x) for other, y in values[1]):
            place = next(name for name, given in sides[0].items() if given == rate)
            return [f"dropout, which is off here: that of the reference's {place} has another "
                    "place in the port"]  # fmt: skip
    return []
