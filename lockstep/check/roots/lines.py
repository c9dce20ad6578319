"""The two source lines at which the programs part, for the roots of a check."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

from lockstep.check.following.apart import STOPS, PartedAt, find_parts, part_at
from lockstep.check.following.follow import ROUNDED, Followed, follow
from lockstep.check.following.tapes import EQUAL, Asked, Known, LiveTape, RecordedTape, SideTape
from lockstep.check.roots.locate import Root
from lockstep.check.rungs import BATCH, Spot, is_of_a_norm
from lockstep.check.sides.port import Port
from lockstep.check.sides.trace import Trace
from lockstep.errors import UserError
from lockstep.model.params import Arrays
from lockstep.worker import Say, silent
from lockstep_recorder.operations import fingerprint
from lockstep_recorder.recording import prefixed

COARSE = 1e-4  # relative: more than a constant made in float32 makes of a value


def follow_data(reference: Trace, port: Port) -> tuple[RecordedTape, LiveTape, Followed]:
    """Follows the data of the first recorded batch through both programs.

    Returns:
        Both tapes, and what was found.

    Raises:
        UserError: a tape cannot be made.
    """
    theirs = RecordedTape(reference.about.get("tape", {}), reference.arrays)
    batch, spec = prefixed("batch", reference.group("batch/0")), reference.about["batch"]
    ours = LiveTape(port.program, port.initial, batch, spec)
    theirs.add_buffers(_buffers(reference.about, reference.weights))
    buffers = _buffers(port.facts, port.initial)
    ours.add_buffers(buffers)
    return theirs, ours, follow(theirs, ours, reference.weights, buffers)


def _buffers(facts: dict[str, Any], weights: Arrays) -> Arrays:
    return {name: x for name, x in weights.items() if name not in facts["parameters"]}


class Follower:
    """Follows the data once, when it is first asked for, and keeps what was found."""

    def __init__(self, reference: Trace, port: Port, say: Say = silent) -> None:
        self.reference, self.port, self.say = reference, port, say
        self.lacks = "" if port.isolates else "a trace cannot be fed the reference's values"

    @cached_property
    def found(self) -> Followed | None:
        """Returns what was found; None where data cannot be followed, and `lacks` says why."""
        if self.lacks:
            return None
        self.say("following the data through both programs")
        try:
            self.tape, self.port_tape, found = follow_data(self.reference, self.port)
            return found
        except Exception as error:  # whatever happens here, the verdict stands
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            self.lacks = f"{kind}{error}"
            return None

    def parts_with(
        self, weights: Arrays, tolerance: float, shown: bool, step: int = 0,
        tape: RecordedTape | None = None,
    ) -> list[PartedAt]:  # fmt: skip
        """Finds where values part in a port with these weights, of which it makes other values than
        with those that following the data has found, such as a query and a key exchanged.

        Args:
            tolerance: relative.
            shown: the port shows modules: values that get no gradient, such as the batch, are then
                not compared.
            step: of the batch.
            tape: the reference's, with that batch; that of the trace is with the first.
        """
        tape, batch = tape or self.tape, prefixed("batch", self.reference.group(f"batch/{step}"))
        port = LiveTape(self.port.program, weights, batch, self.reference.about["batch"],
                        {} if shown else None)  # fmt: skip
        port.add_buffers(_buffers(self.port.facts, weights))
        port.start()
        given = {n: weights[name] for name, n in port.numbers.items() if name in weights}
        rows = dict(zip(port.data, port.play(given, [] if shown else port.data)))
        port.rows = port.rows if shown else rows
        known = Known(tape.data, tape.rows, tolerance)
        met = {n: known.find(row) for n, row in port.rows.items()}
        met |= port.stacks([n for n, found in met.items() if not found], known)
        return find_parts(tape, port, known, port.rows, met, {})

    def tape_of_batch(self, program: Asked, step: int) -> RecordedTape:
        """Makes the reference's tape with another batch than the first."""
        batch, spec = self.reference.group(f"batch/{step}"), self.reference.about["batch"]
        given = prefixed("weights", self.reference.weights) | prefixed("batch", batch)
        program.ask("widen", given, batch=spec)
        about, arrays = program.ask("tape of a batch", given, batch=spec)
        tape = RecordedTape(about, prefixed("tape", arrays))
        tape.add_buffers(_buffers(self.reference.about, self.reference.weights))
        return tape


def name_lines(
    roots: list[Root], follower: Follower, rounded: bool, weights: Arrays, shown: set[str],
    by_hand: bool = False,
) -> list[str]:  # fmt: skip
    """Adds the two lines to the roots of the forward pass; returns notes.

    A root of the forward pass has the lines of the place where values part between what its module
    is given and what it gives. Where no place stands there, as inside a program that shows no
    module, the first root has the first place. One before what modules give is right, though the
    walk cannot follow it: then it has the first behind these in a run with its weights. Another has
    what first uses a tensor of its module, see `_uses_of_module`. A root of the backward pass
    has its lines already. Running statistics are made where their norm's tensors are used; of other
    state it is not known which lines make it, and none are named.

    Args:
        rounded: a program makes a constant in float32, where values part, too.
        weights: the port's, that the roots were found with.
        shown: in/SLOT and act/SLOT of the reference that the port's modules show.
        by_hand: some tensors are paired by hand, which values may not have paired.
    """
    forward = [root for root in roots if root.direction == "forward" and root.rung == "2i"]
    states = [root for root in forward if root.largest.rule == "state"]
    forward = [root for root in forward if root not in states]
    states = [root for root in states if all(map(is_of_a_norm, root.spots))]
    if not (forward or states):
        return []
    found = follower.found
    if found is None:
        return [f"no lines are named: {follower.lacks}"]
    # The walk goes on behind a difference; what shows no module has one place, and its weights.
    own = forward and (found.equal or by_hand or not shown)
    tolerance = ROUNDED if rounded else EQUAL
    of_these = follower.parts_with(weights, tolerance, bool(shown)) if own else found.parts
    fine, coarse = ([part for part in parts if part.reference and part.port]
                    for parts in (of_these, found.coarse))  # fmt: skip
    if rounded:  # any value that meets such a constant parts from the other side's
        fine = fine if own else []
        forward = [root for root in forward if root.largest.figure > COARSE]

    def parts_for(root: Root) -> list[PartedAt]:
        return coarse if not own and coarse and root.largest.figure > COARSE else fine

    sides = follower.tape, follower.port_tape
    arrays = follower.reference.arrays
    places = _Places(follower.tape, {key: arrays[key] for key in sorted(shown)})
    for root in forward:
        inside = set[int]().union(*(places.inside(spot) for spot in root.spots))
        here = next((part for part in parts_for(root) if part.number in inside), None)
        if here:
            root.put_lines(here)
    if forward and not any(root.lines for root in forward):
        right = set.intersection(*map(places.before, forward[0].spots))
        first = parts_for(forward[0])[:1]
        if any(part.number in right for part in first):  # what the walk cannot follow there
            first = follower.parts_with(weights, tolerance, bool(shown))
        for part in [part for part in first if part.number not in right][:1]:
            forward[0].put_lines(part)
    for root in [root for root in forward + states if not (root.lines or rounded)]:
        if used := _uses_of_module(root.spots[0], sides):
            root.put_lines(used)
    lacking = rounded and not all(root.lines for root in forward)
    why = "no lines are named: values part at a constant made in float32, too"
    return [why] * (lacking or (rounded and not forward))


def name_lines_of_batches(
    roots: list[Root], follower: Follower, weights: Arrays, again: Callable[[], Asked]
) -> None:
    """Adds the two lines to a root of which a batch behind the first shows a difference.

    Args:
        weights: the port's, with which the batch's loss is to be another.
        again: starts the reference's program once more.
    """
    for root in roots:
        step = root.where.removeprefix(BATCH)
        if root.direction != "accumulation" or not step.isdecimal():
            continue
        tolerance = 1e-13
        with contextlib.suppress(Exception):  # whatever happens here, the verdict stands
            tape = follower.tape_of_batch(again(), int(step))
            for part in follower.parts_with(weights, tolerance, False, int(step), tape)[:1]:
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
        return self.tape.above(self._ends(spot)[:1]) - self.before(spot)

    def before(self, spot: Spot) -> set[int]:
        """Returns the values that modules give or are given before a place, and those before."""
        ends = self._ends(spot)
        above = self.tape.above(ends[:1])
        return self.tape.above(numbers[0] for numbers in self.numbers.values()
                               if numbers[0] in above and not {*ends} & {*numbers})  # fmt: skip

    def _ends(self, spot: Spot) -> list[int]:
        if spot.rule == "loss":
            return [self.tape.loss]
        return self.numbers.get(f"{'in' if spot.rule == 'input' else 'act'}/{spot.where}", [])
