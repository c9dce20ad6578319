"""The two source lines at which the programs part, for the roots of a check."""

import contextlib
from collections.abc import Callable
from dataclasses import replace

from lockstep.check.align import Alignment
from lockstep.check.follower import Follower
from lockstep.check.following.apart import STOPS, PartedAt, part_at
from lockstep.check.following.tapes import Asked, Known, RecordedTape, SideTape
from lockstep.check.roots.locate import Root
from lockstep.check.rungs import BATCH, Spot, is_of_a_norm
from lockstep.model.params import Arrays
from lockstep_recorder.calls import MOST, slot
from lockstep_recorder.operations import fingerprint

SEEN = 1e-6  # relative: a gap that the walk, for which 1e-9 is equal, does not miss


def find_partings(roots: list[Root], aligned: Alignment) -> tuple[list[Root], str]:
    """Finds the places at which values part, for the roots of the forward pass.

    A root has the place between what its module is given and what it gives; each further place
    there, as inside a program that shows no module, is a root of its own. Where the values part
    nowhere else on the way to the loss, what has no place is none, if it is so far apart that the
    walk would see it. Of places that stand in no module, the first root has the first.

    Returns:
        The roots, and why they have no places, or "".
    """
    forward = [root for root in roots if _is_of_values(root)]
    if not forward:
        return roots, ""
    follower, trial = aligned.follower, aligned.trial
    found = follower.parted(aligned.entries, trial.weights)
    if found is None or follower.tapes is None:
        return roots, f"no lines are named: {follower.lacks}"
    shown = {r for slots in trial.pairing.slots.values() for r in slots.values()}
    arrays = follower.reference.arrays
    places = _Places(follower.tapes[0], {key: arrays[key] for key in sorted(shown)})
    inside = {root: set[int]().union(*map(places.inside, root.spots)) for root in forward}
    parts: dict[Root, dict[str, PartedAt]] = {root: {} for root in forward}  # by the port's line
    left = []
    for part in (part for part in found.parts if part.reference and part.port):
        numbers = part.given, part.number
        held = (root for n in numbers for root in forward if n in inside[root])
        if root := next(held, None):
            parts[root].setdefault(part.port, part)
        else:
            left.append(part)
    made: dict[Root, list[Root]] = {}
    for root in forward:
        here = [*parts[root].values()]
        root.part = here[0] if here else None
        made[root] = [root, *map(root.further_at, here[1:] if found.all else [])]
    if not any(root.part for root in forward):
        right = set.intersection(*map(places.before, forward[0].spots))
        forward[0].part = next((part for part in left if part.number not in right), None)
    elif found.all and not left:
        hidden = frozenset[int]().union(*(part.hidden for part in found.parts))
        seen = [root for root in forward
                if root.largest.figure > SEEN and hidden.isdisjoint(inside[root])
                and all(map(places.reaches_loss, root.spots))]  # fmt: skip
        made |= {root: [] for root in seen if not root.part}
    return [each for root in roots for each in made.get(root, [root])], ""


def _is_of_values(root: Root) -> bool:
    isolated = root.direction == "forward" and root.rung == "2i"
    return isolated and root.largest.rule != "state"


def name_lines(roots: list[Root], follower: Follower) -> None:
    """Adds the two lines to the roots of the forward pass.

    A root without a place has what first uses a tensor of its module, see `_uses_of_module`.
    Running statistics are made where their norm's tensors are used; of other state it is not known
    which lines make it, and none are named. A root of the backward pass has its lines already.
    """
    for root in [root for root in roots if not root.lines]:
        if root.part:
            root.put_lines(root.part)
            continue
        state = root.direction == "forward" and root.rung == "2i" and not _is_of_values(root)
        known = _is_of_values(root) or (state and all(map(is_of_a_norm, root.spots)))
        if known and follower.tapes and (used := _uses_of_module(root.spots[0], follower.tapes)):
            root.put_lines(used)


def name_lines_of_batches(
    roots: list[Root], aligned: Alignment, again: Callable[[], Asked]
) -> None:
    """Adds the two lines to a root of which a batch behind the first shows a difference.

    Args:
        again: starts the reference's program once more.
    """
    for root in roots:
        step = root.where.removeprefix(BATCH)
        if root.direction != "accumulation" or not step.isdecimal():
            continue
        entries, weights = aligned.entries, aligned.trial.weights
        with contextlib.suppress(Exception):  # whatever happens here, the verdict stands
            found = aligned.follower.parted_of_batch(again(), int(step), entries, weights)
            for part in found.parts[:1]:
                root.put_lines(part)


def _uses_of_module(spot: Spot, sides: tuple[SideTape, SideTape]) -> PartedAt | None:
    """Finds what first uses a tensor of the module on each side, or of the module around that which
    is given a wrong value: values are paired there, though names say otherwise, such as those of a
    table that is read in another order. For what the model is given, what first uses the batch."""
    users = []
    for side, place in zip(sides, (spot.where, spot.port)):
        module = place.partition("#")[0]
        if module == "(root)" and spot.rule == "input":
            held = {n for n, value in enumerate(side.values) if value.op == "batch"}
        else:
            around = module.rpartition(".")[0] if spot.rule in ("state", "input") else module
            held = {n for name, n in side.numbers.items() if name.startswith(f"{around}.")}
        users.append(_first_use(side, held))
    r, p = users
    used = None if r is None or p is None else part_at(sides[0], r, sides[1], p)
    return replace(used, near=True) if used and used.reference and used.port else None


def _first_use(side: SideTape, numbers: set[int]) -> int | None:
    users = sorted({user for n in numbers for user in side.users[n]})
    stops = [user for user in users if side.values[user].op in STOPS]
    return next(iter(stops or [user for user in users if user not in numbers]), None)


class _Places:
    """The places of a reference's modules on its tape.

    Args:
        arrays: `in/SLOT` and `act/SLOT` of modules that have a partner.
    """

    def __init__(self, tape: RecordedTape, arrays: Arrays) -> None:
        self.tape = tape
        known = Known(tape.data, tape.rows)
        found = {key: known.find(fingerprint(x)) for key, x in arrays.items()}
        self.numbers = {key: numbers for key, numbers in found.items() if numbers}

    def inside(self, spot: Spot) -> set[int]:
        """Returns the values between a place and those that modules give or are given before it."""
        ends = self._ends(spot)
        return (self.tape.above(ends) - self.before(spot)) | {*ends}

    def before(self, spot: Spot) -> set[int]:
        """Returns the values that modules give or are given before a place, and those before."""
        ends = self._ends(spot)
        above = self.tape.above(ends)
        return self.tape.above(numbers[0] for numbers in self.numbers.values()
                               if numbers[0] in above and not {*ends} & {*numbers})  # fmt: skip

    def reaches_loss(self, spot: Spot) -> bool:
        """Says if what differs is on the way to the loss."""
        ends = self._ends(spot)
        return bool(ends) and self.tape.needed.issuperset(ends)

    def _ends(self, spot: Spot) -> list[int]:
        if spot.rule == "loss":
            return [self.tape.loss]
        kind = "in" if spot.rule == "input" else "act"
        keys = (f"{kind}/{slot(spot.where, at)}" for at in range(MOST))
        return [n for key in keys for n in self.numbers.get(key, [])]
