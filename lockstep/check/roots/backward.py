"""Where the backward passes of two programs part: an operation on each side.

Values that both programs have are paired by their elements, and the gradients of the loss with
respect to them are compared. The root is the operation whose results get equal gradients while a
value that it is given gets another.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from lockstep.check.following.apart import LARGEST, MOVES, STOPS, PartedAt, part_at
from lockstep.check.following.difference import Cause
from lockstep.check.following.follow import ROUNDED
from lockstep.check.following.tapes import EQUAL, Known, LiveTape, RecordedTape, SideTape, are_alike
from lockstep.check.prove import Trial
from lockstep.check.roots.locate import Root
from lockstep.check.rungs import Spot
from lockstep.check.sides.port import Port
from lockstep.check.sides.trace import Trace
from lockstep.errors import UserError
from lockstep.model.params import Arrays
from lockstep_recorder.operations import fingerprint
from lockstep_recorder.recording import prefixed

PLAIN = MOVES | {"add", "sub"}  # what cannot have another derivative
NOISE = 1e-12  # of the largest gradient: a smaller one is nothing but rounding


class Gradients:
    """One side: its tape, and the gradient of the loss with respect to its values.

    Args:
        rows: by value: its fingerprint.
        cotangents: the same of its gradient; none of a value inside of an operation that has its
            own derivative.
    """

    def __init__(
        self, tape: SideTape, rows: dict[int, np.ndarray], cotangents: dict[int, np.ndarray]
    ) -> None:
        self.tape, self.rows, self.cotangents = tape, rows, cotangents
        self.compared = [n for n in sorted(cotangents) if self._is_compared(n)]
        self.known = Known(self.compared, np.array([rows[n] for n in self.compared]))
        self.apart: set[int] = set()  # gets another gradient than each of the other side's like it
        self.agreeing: set[int] = set()

    def _is_compared(self, number: int) -> bool:
        """Says if a value has all of its gradient: a copy has that of its own uses alone."""
        value = self.tape.values[number]
        if number not in self.rows or number not in self.tape.needed or value.size < 2:
            return False
        row = self.rows[number]
        return bool(row[5] != row[6]) and not self._is_copy(number)

    def _is_copy(self, number: int) -> bool:
        value = self.tape.values[number]
        if value.op in STOPS:
            return True
        if value.op not in MOVES or len(value.inputs) != 1 or value.inputs[0] not in self.rows:
            return False
        (source,) = value.inputs
        same = are_alike(self.rows[source][None], self.rows[number])[0]
        return bool(same) and len(self.tape.users[source]) > 1

    def compare(self, other: "Gradients", tolerance: float, floor: float) -> None:
        """Finds the values whose gradient is, or is not, that of a value of the other side."""
        for n in self.compared:
            alike = other.known.find(self.rows[n])
            theirs = np.array([other.cotangents[m] for m in alike])
            if alike:
                equal = _are_equal(theirs, self.cotangents[n], tolerance, floor)
                (self.agreeing if equal else self.apart).add(n)

    def reach(self, numbers: Iterable[int]) -> set[int]:
        """Returns values, and what is made of them through none that gets an equal gradient: from
        there a wrong one may come."""
        stack = list(numbers)
        seen = set(stack)
        while stack:
            fresh = set(self.tape.users[stack.pop()]) - seen - self.agreeing
            stack += fresh
            seen |= fresh
        return seen

    def lowest(self, numbers: set[int]) -> set[int]:
        """Returns those of some values from which no other of them is reached."""
        above = set[int]()
        for n in sorted(self.tape.needed, reverse=True):
            if any(
                u in numbers or u in above for u in self.tape.users[n] if u not in self.agreeing
            ):
                above.add(n)
        return numbers - above

    def uses(self, numbers: set[int]) -> "list[Use]":
        """Lists what is made of values that are one; uses that meet before their ends are one."""
        found: list[Use] = []
        for user in sorted({user for n in numbers for user in self.tape.users[n]} - numbers):
            use = self._use(user)
            for other in [other for other in found if other.ends & use.ends]:
                found.remove(other)
                use = Use(other.between | use.between, other.ends | use.ends)
            found.append(use)
        return found

    def _use(self, user: int) -> "Use":
        seen, ends, stack = {user}, set[int](), [user]
        while stack:
            n = stack.pop()
            if n in self.agreeing or n == self.tape.loss:
                ends.add(n)
            else:
                fresh = set(self.tape.users[n]) - seen
                seen |= fresh
                stack += fresh
        return Use(seen, ends)

    def stop_in(self, use: "Use") -> int | None:
        """Returns the first operation of a use that stops the gradient."""
        return min(filter(self._stops, use.between), default=None)

    def _stops(self, number: int) -> bool:
        """Says if an operation stops a gradient that would pass: not that of the largest, which a
        softmax subtracts, and none that the recorder calls."""
        value = self.tape.values[number]
        if value.op not in STOPS or not value.line:
            return False
        while value.op in MOVES or value.op in STOPS:
            value = self.tape.values[value.inputs[0]]
        return value.op not in LARGEST

    def operation(self, use: "Use") -> int:
        """Returns the operation of a use that is to be shown: what is made first of the last value
        that gets another gradient."""
        last = max(use.between & self.apart, default=None)
        behind = set() if last is None else use.between & set(self.tape.users[last])
        return min(behind or use.between)


def _are_equal(rows: np.ndarray, row: np.ndarray, tolerance: float, floor: float) -> bool:
    """Says if a gradient is one of some, in any order of its elements."""
    small = np.maximum(rows[:, 3], row[3]) <= floor * row[0]
    finite = (rows[:, 1] == 0) & (row[1] == 0)
    return bool((are_alike(rows, row, tolerance) | (small & finite)).any())


@dataclass(frozen=True)
class Use:
    """One use of a value: the values made of it, and the ends, which get equal gradients on both
    sides."""

    between: set[int]
    ends: set[int]


class Backward:
    """Compares the gradients of a port, in which each module is fed the reference's values and
    gradients, with those of the reference.

    Args:
        forced: the reference's values, by the port's calls.

    Raises:
        UserError: a side has no gradients of its values.
    """

    def __init__(self, reference: Trace, port: Port, trial: Trial, forced: Arrays) -> None:
        theirs = RecordedTape(reference.about.get("tape", {}), reference.arrays)
        if not theirs.cotangents:
            raise UserError("the trace has no gradients of single values; record it again")
        rows = dict(zip(theirs.data, theirs.rows))
        self.reference = Gradients(theirs, rows, theirs.cotangents)
        batch = prefixed("batch", reference.group("batch/0"))
        given = {k: x for k, x in forced.items() if not k.startswith("in/")}
        ours = LiveTape(port.program, trial.weights, batch, reference.about["batch"], given)
        self.port = Gradients(ours, ours.rows, ours.cotangents)
        self.sides = self.reference, self.port
        floor = NOISE * max(row[3] / row[0] for row in theirs.cotangents.values())
        rounded = reference.about["rounded"] or port.facts["rounded"]
        tolerance = ROUNDED if rounded else EQUAL
        self.reference.compare(self.port, tolerance, floor)
        self.port.compare(self.reference, tolerance, floor)
        self.arrays = reference.arrays

    @cached_property
    def parted(self) -> list[tuple[int, int]]:
        """The pairs of values that get another gradient, though none that it comes from does; the
        nearest to the loss first."""
        reference, port = self.sides
        pairs = [(r, p) for p in sorted(port.apart, reverse=True)
                 for r in reference.known.find(port.rows[p]) if r in reference.apart]  # fmt: skip
        lowest = reference.lowest({r for r, _ in pairs}), port.lowest({p for _, p in pairs})
        return [(r, p) for r, p in pairs if r in lowest[0] and p in lowest[1]]

    def find(self, spot: Spot) -> "tuple[PartedAt | None, bool]":
        """Finds the operation on each side from which a wrong gradient comes.

        Returns:
            The operations, and whether values show them: else they are what uses the value.
        """
        numbers = self._values_of(spot)
        reached = [side.reach(of) for side, of in zip(self.sides, numbers)]
        pairs = [(r, p) for r, p in self.parted if r in reached[0] or p in reached[1]]
        if pairs:
            numbers = [{n} for n in pairs[0]]
        if not all(numbers):
            return None, False
        theirs, ours = (side.uses(of) for side, of in zip(self.sides, numbers))
        if not (theirs and ours):
            return None, False
        of_theirs, of_ours = self._suspected(theirs, ours)
        r, p = self.reference.stop_in(of_theirs), self.port.stop_in(of_ours)
        lacks = p is None and r is not None  # no line of the port stops it
        stopped = self._stopped(of_theirs if r is None else of_ours, r, p)
        if (r is None) == (p is None):  # both stop a gradient, or none does
            r = p = None
        r = self.reference.operation(of_theirs) if r is None else r
        p = self.port.operation(of_ours) if p is None else p
        found = replace(part_at(self.reference.tape, r, self.port.tape, p),
                        near=lacks or not pairs, cause=stopped)  # fmt: skip
        return found if found.reference and found.port else None, bool(pairs)

    def _stopped(self, passing: "Use", r: int | None, p: int | None) -> Cause | None:
        """Tells of a stop that one side alone has, where a gradient passes on the other.

        Args:
            passing: the use on the side without a stop.
            r, p: the operations that stop the gradient, of the reference and of the port.
        """
        if (r is None) == (p is None):
            return None
        side = self.reference if r is None else self.port
        first = side.cotangents.get(min(passing.between))
        if first is None or not first[3]:  # such as in torch.no_grad, which is no operation
            return None
        if r is None:
            return Cause("no gradient", "the gradient is stopped here alone", "do not stop it")
        return Cause("gradient not stopped", "the gradient is not stopped here",
                          "stop the gradient as the reference does")  # fmt: skip

    def _values_of(self, spot: Spot) -> list[set[int]]:
        """Returns each side's values, or its tensor, that get a wrong gradient."""
        if spot.rule == "gradient":
            names = spot.where.partition("[")[0], spot.port.partition("[")[0]
            return [{side.tape.numbers[name]} if name in side.tape.numbers else set()
                    for side, name in zip(self.sides, names)]  # fmt: skip
        x = self.arrays.get(f"act/{spot.where}")
        if x is None:
            return [set(), set()]
        return [set(side.known.find(fingerprint(x))) for side in self.sides]

    def _suspected(self, theirs: list[Use], ours: list[Use]) -> tuple[Use, Use]:
        """Chooses the use that a wrong gradient comes from, of each side: one in which one side
        alone stops the gradient, or that one side alone has, or that is more than a sum."""
        pairs = [(a, b) for a in theirs for b in ours if self._end_alike(a, b)]
        alone = ([a for a in theirs if not any(a is x for x, _ in pairs)],
                 [b for b in ours if not any(b is y for _, y in pairs)])  # fmt: skip
        if any(alone):
            pairs.append(((alone[0] or theirs)[0], (alone[1] or ours)[0]))

        def weight(pair: tuple[Use, Use]) -> int:
            stops = [side.stop_in(use) is not None for side, use in zip(self.sides, pair)]
            if any(stops) and not all(stops):
                return 4
            if pair is pairs[-1] and any(alone):
                return 3
            plain = all(side.tape.values[n].op in PLAIN
                        for side, use in zip(self.sides, pair) for n in use.between)  # fmt: skip
            return 2 if all(stops) else int(not plain)

        return max(pairs, key=weight)

    def _end_alike(self, theirs: Use, ours: Use) -> bool:
        if self.reference.tape.loss in theirs.ends and self.port.tape.loss in ours.ends:
            return True
        rows = [self.port.rows[p] for p in ours.ends if p in self.port.rows]
        return any(theirs.ends & set(self.reference.known.find(row)) for row in rows)


def name_and_join(
    roots: list[Root], reference: Trace, port: Port, trial: Trial, forced: Arrays
) -> list[str]:
    """Adds the two lines to the roots of the backward pass, joins those that come of one operation,
    and returns notes."""
    backward = [root for root in roots if root.direction == "backward" and root.rung == "3i"]
    if not backward or not trial.isolated:
        return []
    try:
        compared = Backward(reference, port, trial, forced)
    except Exception as error:  # whatever happens here, the verdict stands
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        return [f"no lines are named for gradients: {kind}{error}"]
    joined: dict[PartedAt, Root] = {}
    for root in backward:
        found, is_shown = compared.find(root.spots[0])
        if found is None:
            continue
        root.put_lines(found)
        if not is_shown:
            continue
        if found in joined:
            first = joined[found]
            roots[roots.index(first)] = joined[found] = first.joined_with(root)
            roots.remove(root)
        else:
            joined[found] = root
    return []
