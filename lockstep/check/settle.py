"""Gives each finding a fate: none is dropped, and the ends alone make the verdict.

A finding is a root, an echo of a named root that may cause it, excused by a mend (`excuses`), or
inside: a value between the ends, which locates a difference and is none while no end shows it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from lockstep.check import names
from lockstep.check.outputs import PLACE, UNSEEN
from lockstep.check.roots.locate import Root, group_updates, list_some, root_of, root_of_free_run
from lockstep.check.rungs import OWN, Spot, Stage, is_of_a_norm
from lockstep.check.sides.modules import Calls

ROOT, ECHO, EXCUSED, INSIDE = "root", "echo", "excused", "inside"
TRAINED = {"forward", "backward", "mapping", "update", "state", "accumulation"}
# Directions of roots from which an end's difference may come, by its rung and rule.
CAUSED_BY = {
    ("2", "loss"): {"forward", "mapping"},
    ("2", "state"): {"forward", "mapping"},
    ("3", "gradient"): {"forward", "backward", "mapping"},
    ("4i", "update"): {"update", "mapping"},
    ("4i", "state"): {"update", "mapping"},
    ("4", "state"): {"update", "mapping"},
    ("4", "update"): {"update", "mapping"},
    ("4i", OWN): {"forward", "backward", "mapping", "update"},
    ("4", OWN): {"forward", "backward", "mapping", "update"},
    ("5", "loss"): {"forward", "mapping", "accumulation", "state"},
    ("5", "gradient"): {"forward", "backward", "mapping", "accumulation", "state"},
    ("5", "state"): {"forward", "mapping", "accumulation", "state"},
    ("6", "result"): {"forward", "mapping", "accumulation", "state"},
    ("8", "curve"): TRAINED,
    ("8", "state"): TRAINED,
}
ORDER = ("1", "2", "3", "5", "6", "4i", "4", "8")
FOLLOWS = 10  # times what is accepted, at most, that follows from it where it cannot be mended


@dataclass(frozen=True)
class Fate:
    """Says how the verdict counts a finding; `of` names its root or its excuse."""

    kind: str
    of: str = ""


def may_cause(root: Root, spot: Spot) -> bool:
    """Says if an end's difference may come from a root, by what a program computes of what."""
    of_state = all(each.rule == "state" for each in root.spots)
    directions = {"state"} if of_state else {root.direction}
    if of_state and all(map(is_of_a_norm, root.spots)):
        return spot.rule == "state"  # which no forward pass of training reads
    if all(each.rule == "as written" for each in root.spots):
        return False  # a format that these runs in float64 do not have
    alone = all(each.rule == "loss" for each in root.spots)
    if spot.rule == "result" and root.direction == "forward" and alone:
        return False  # the loss stands behind what the model gives
    if of_state and spot.rule == "state":
        return True
    return bool(directions & CAUSED_BY.get((spot.rung, spot.rule), set()))


def complete(stages: Iterable[Stage], roots: list[Root], calls: Calls) -> list[Root]:
    """Makes roots of the ends' differences that may come from none, the first rung first; what
    follows from these is no root of its own."""
    by_number = {stage.number: stage for stage in stages}
    made = list(roots)
    for number in ORDER:
        stage = by_number.get(number)
        taken = {spot for root in made for spot in root.spots}
        left = [spot for spot in (stage.spots if stage else []) if spot.is_end and spot not in taken
                and not any(may_cause(root, spot) for root in made)]  # fmt: skip
        if number == "2" and left and stage and made == roots:
            left = [stage.spots[0], *left]  # the first place that differs, inside
        made += _roots_of(number, left, calls)
    return made


def _roots_of(number: str, left: list[Spot], calls: Calls) -> list[Root]:
    """Makes the roots of what one rung shows alone."""
    ended = [spot for spot in left if spot.rule == "end"]
    left = [spot for spot in left if spot.rule != "end"]
    made = [_end(spot) for spot in ended]
    if not left:
        return made
    if number in ("4", "4i"):
        states = [spot for spot in left if spot.rule == "state"]
        moved = [spot for spot in left if spot.rule != "state"]
        made += group_updates(moved, names.numbers_of_no_layer(calls.kinds))
        kept = list_some([spot.where for spot in states])
        return [*made, *([root_of(number, kept, "update", states)] if states else [])]
    if number == "6":
        exchanged = [spot for spot in left if spot.rule == PLACE]
        made += [_exchanged(exchanged)] if exchanged else []
        left = [spot for spot in left if spot.rule != PLACE]
        if not left:
            return made
        unseen = next((spot.detail for spot in left if spot.detail.startswith(UNSEEN)), "")
        root = root_of("6", "outputs", "outputs", left)
        root.names = ["outputs", *root.names]
        root.hints = [f"they differ {unseen}"] if unseen else []
        return [*made, root]
    if number == "3":
        places = [spot.where for spot in left]
        return [*made, root_of("3", list_some(places), "backward", left)]
    direction = {"1": "mapping", "2": "forward", "5": "accumulation", "8": "loss curves"}[number]
    found = root_of_free_run(left[0], direction)
    states = [spot for spot in left[1:] if spot.rule == found.largest.rule == "state"]
    found.spots += states
    found.names = sorted({spot.where for spot in found.spots})
    return [*made, found]


def _exchanged(spots: list[Spot]) -> Root:
    """Makes the root of outputs that are equal at another place: a tuple's order is what those who
    take it apart rely on, as on the keys of a dict."""
    root = root_of("6", "outputs", "outputs", spots)
    root.cause = "another place in a tuple: " + list_some([spot.where for spot in spots])
    root.remedy = "give them in the reference's order, or --accept 'outputs=outputs'"
    return root


def _end(spot: Spot) -> Root:
    """Makes the root of a program that ends earlier than the other."""
    root = root_of(spot.rung, f"optimizer: {spot.where}", "update", [spot])
    root.names = ["optimizer", spot.where]
    root.cause = f"{spot.where}: {spot.detail}"
    root.remedy = "let both train as long"
    return root


def left_of_accepted(
    stages: dict[str, Stage], accepted: list[Root], calls: Calls, *, mended: bool
) -> list[Root]:
    """Makes roots of what is left when the accepted roots are mended.

    Fed the reference's values in all places (rungs 2i and 3i), what comes out right follows from
    what is accepted. What that cannot show is allowed a few times what is accepted.

    Args:
        mended: later batches were compared in the same way, and the loss curve follows.
    """
    taken = {spot for root in accepted for spot in root.spots}
    isolated = {("3", "gradient"): "3i", ("2", "loss"): "2i"}  # the rung that mends, of an end

    def is_mended(spot: Spot) -> bool:
        number = isolated.get((spot.rung, spot.rule))
        if number and not stages[number].lacks:
            return spot.where not in {other.where for other in stages[number].spots}
        return mended and (spot.rung == "8" or spot.rule in ("loss", "gradient"))

    batches = sum(found.rule == "loss" for found in stages["5"].findings)

    def is_left(spot: Spot) -> bool:
        causes = [root for root in accepted if may_cause(root, spot)]
        figures = [root.largest.figure for root in causes if np.isfinite(root.largest.figure)]
        if figures and is_mended(spot):
            return False
        own = spot.rule == "state" and any(spot.where in root.names for root in causes)
        # Each batch adds as much to a state, of which it leaves less than there was.
        most = max(FOLLOWS, 2 * batches) if own else FOLLOWS
        return not relative_gap(spot) <= most * max(figures, default=0.0)

    kept = []
    for stage in stages.values():
        left = [spot for spot in stage.spots if spot.is_end and spot not in taken and is_left(spot)]
        kept.append(replace(stage, findings=list(left), excused=[]))
    return complete(kept, [], calls)


def relative_gap(spot: Spot) -> float:
    """Returns a spot's figure; of curves, whose figure is by their noise, the gap by their size."""
    if spot.rule != "curve" or spot.ours is None or spot.theirs is None:
        return spot.figure
    return float(np.abs(spot.ours - spot.theirs).max() / np.abs(spot.theirs).max())


def settle(
    stages: Iterable[Stage], roots: list[Root], excuses: dict[Spot, str]
) -> dict[Spot, Fate]:
    """Finds what became of each finding.

    Args:
        roots: of the verdict, accepted or beside it.
        excuses: the names of the excuses, by what they mended.
    """
    held = {spot: root for root in roots for spot in root.spots}
    found: dict[Spot, Fate] = {spot: Fate(EXCUSED, name) for spot, name in excuses.items()}
    for stage in stages:
        for spot in stage.every_spot:
            cause = held.get(spot) or next((r for r in roots if may_cause(r, spot)), None)
            if spot in held:
                found[spot] = Fate(ROOT, held[spot].where)
            elif spot in found:
                continue
            elif cause:
                found[spot] = Fate(ECHO, cause.where)
            elif not spot.is_end:
                found[spot] = Fate(INSIDE)
    return found


def require_settled(stages: Iterable[Stage], fates: dict[Spot, Fate]) -> None:
    """Asserts that no finding is dropped: the last thing before a verdict."""
    lost = [spot for stage in stages for spot in stage.every_spot if spot not in fates]
    assert not lost, f"findings without a root, an echo or an excuse: {list(map(str, lost[:4]))}"
