"""Where the values of two programs part: an operation on each side."""

from dataclasses import dataclass

import numpy as np

from lockstep.check.tapes import Known, RecordedTape, SideTape, are_alike


@dataclass(frozen=True)
class PartedAt:
    """A place where the values of the two programs part: an operation on each side.

    Attributes:
        reference: FILE:LINE and its text.
        operations: the name of each, the shapes of its inputs, its attributes.
        number: on the reference's tape.
    """

    reference: str
    port: str
    operations: tuple[str, str] = ("", "")
    number: int = -1


def part_at(reference: SideTape, r: int, port: SideTape, p: int) -> PartedAt:
    """Tells two operations, by their numbers."""
    return PartedAt(reference.line(r), port.line(p), (reference.tell(r), port.tell(p)), r)


Met = dict[int, list[int]]  # the port's value -> those of the reference


def find_parts(
    reference: RecordedTape, port: SideTape, known: Known, rows: dict[int, np.ndarray], met: Met,
    replaced: dict[int, int],
) -> list[PartedAt]:  # fmt: skip
    """Finds the operations behind which values part, in the order of the program.

    Args:
        known: the reference's values.
        rows: the fingerprints of the port's.
        met: values that are alike.
        replaced: the port's values in whose place the reference's were put.
    """
    theirs = {n for found in met.values() for n in found}
    ours = {n for n, found in met.items() if found}
    put = set(replaced.values()), set(replaced)
    alive = (
        _alive(reference, theirs, put[0], known.rows, known.tolerance),
        _alive(port, ours, put[1], rows, known.tolerance),
    )
    ends = [(r, p) for p, r in replaced.items()]
    if reference.loss not in met.get(port.loss, []):
        ends.append((reference.loss, port.loss))
    return [
        part_at(reference, _first_apart(reference, alive[0] | (put[0] - {r}), r),
                port, _first_apart(port, alive[1] | (put[1] - {p}), p))
        for r, p in ends
    ]  # fmt: skip


def _alive(
    side: SideTape, met: set[int], cut: set[int], rows: dict[int, np.ndarray], tolerance: float
) -> set[int]:
    """The values from which some value that both sides have is made."""
    found: set[int] = set()
    for n in reversed(side.data):
        users = (user for user in side.users[n] if user in found)
        if n in met or (
            n not in cut and any(_depends(side, user, n, rows, tolerance) for user in users)
        ):
            found.add(n)
    for n in side.data:  # such as x + y, where y is zero by mistake
        if n in found and side.is_float(n):
            others = [i for i in side.data_inputs(n) if i not in found and side.is_float(i)]
            if any(not _depends(side, n, i, rows, tolerance) for i in others):
                found.remove(n)
    return found


def _depends(
    side: SideTape, user: int, number: int, rows: dict[int, np.ndarray], tolerance: float
) -> bool:
    """Says if a value tells something of one of its inputs; not where it is another, unchanged."""
    if user not in rows or not side.is_float(number):
        return True
    same = [n for n in side.data_inputs(user)
            if n in rows and are_alike(rows[n][None], rows[user], tolerance)[0]]  # fmt: skip
    return not same or number in same


def _first_apart(side: SideTape, alive: set[int], end: int) -> int:
    """The first value on the way to one that nothing of the other side has, made of what it has."""
    reached, stack, firsts = {end}, [end], []
    while stack:
        n = stack.pop()
        apart = [i for i in side.data_inputs(n) if i not in alive]
        if not apart:
            firsts.append(n)
        stack += [i for i in apart if i not in reached]
        reached |= set(apart)
    return min(firsts, key=lambda n: (not side.values[n].line, n))
