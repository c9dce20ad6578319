"""Differences of two programs as they are written, which their runs in float64 leave out."""

from typing import Any

from lockstep.check.roots.locate import Root
from lockstep.check.rungs import Stage
from lockstep_recorder.noise import ULPS

Facts = dict[str, Any]


def compare_as_written(reference: Facts, port: Facts, rung: Stage) -> list[Root]:
    """Returns roots, whose findings it adds to a rung: what the port alone computes in a narrower
    format, though both sides' products have one, and where it alone drops out in evaluation.

    Args:
        reference: what its recording says of it; a trace of before may lack this.
        port: likewise.
    """
    theirs, ours = (facts.get("written") or {} for facts in (reference, port))
    if not (theirs and ours):
        return []
    roots = []
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
        roots.append(root)
    return roots


def _root(rung: Stage, what: str, line: str, figure: float, bound: float) -> Root:
    where = f"{what} at {line.partition('  ')[0]}"
    rung.add("as written", where, figure, bound)
    spot = rung.spots[-1]
    return Root(rung.number, where, "forward", [spot], [where], spot)


def note_dropout(reference: Facts, port: Facts) -> list[str]:
    """Notes that one side alone would drop out in training."""
    sides = {"reference": reference, "port": port}
    drops = {side: (facts.get("written") or {}).get("drops", []) for side, facts in sides.items()}
    found = []
    for (side, places), other in zip(drops.items(), ("port", "reference")):
        if places and not drops[other]:
            more = f" and {len(places) - 1} places more" if len(places) > 1 else ""
            found.append(
                f"the {side} drops out at {places[0]}{more}: switched off here; no dropout of the "
                f"{other} is seen"
            )
    return found
