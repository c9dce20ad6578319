"""Where the values of two programs part: an operation on each side."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, permutations, product
from operator import mul

import numpy as np

from lockstep.check.layout import Shape
from lockstep.check.tapes import Known, LiveTape, RecordedTape, SideTape, are_alike
from lockstep_recorder.operations import SEES_ORDER, ordered

AXES = 5  # of a value whose orders are tried
# Operations that only move, copy or join elements, as torch and JAX call them.
JOINS = {"cat", "concatenate", "stack"}
MOVES = JOINS | {
    "alias", "broadcast_in_dim", "clone", "constant_pad_nd", "copy", "dynamic_slice", "expand",
    "expand_dims", "flip", "gather", "index", "index_select", "narrow", "pad", "permute", "repeat",
    "reshape", "rev", "roll", "select", "slice", "split", "split_with_sizes", "squeeze", "t",
    "tile", "transpose", "unbind", "unsqueeze", "view",
}  # fmt: skip
STOPS = ("detach", "stop_gradient")  # operations that stop a gradient


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
    reference: RecordedTape, port: LiveTape, known: Known, rows: dict[int, np.ndarray], met: Met,
    replaced: dict[int, int],
) -> list[PartedAt]:  # fmt: skip
    """Finds the operations behind which values part, in the order of the program.

    Where both are given the same elements in another order, such as heads that are split otherwise,
    the operations that put them there are found instead.

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
    found: list[PartedAt] = []
    for r, p in ends:
        known_to = alive[0] | (put[0] - {r}), alive[1] | (put[1] - {p})
        reached = [_with_moved(side, of) for side, of in zip((reference, port), known_to)]
        r, p = _first_apart(reference, reached[0], r), _first_apart(port, reached[1], p)
        here = (reference, r), (port, p)
        moved = _find_rearranged(*here, known, rows, met) or _find_moved(*here, known_to) or (r, p)
        found.append(replace(part_at(reference, moved[0], port, moved[1]), number=r))
    return found


def _with_moved(side: SideTape, alive: set[int]) -> set[int]:
    """Adds to values what is moved, copied or joined of them alone: no difference begins there,
    but by another order or other elements, for which its users are looked at."""
    found = set(alive)
    for n in side.data:
        if side.values[n].op in MOVES and found.issuperset(side.data_inputs(n)):
            found.add(n)
    return found


def _find_moved(
    theirs: tuple[SideTape, int], ours: tuple[SideTape, int], alive: tuple[set[int], set[int]]
) -> tuple[int, int] | None:
    """Finds what moves other elements to two operations, such as a shift the other way; None where
    these are given what both sides have."""
    firsts = []
    for (side, number), of in zip((theirs, ours), alive):
        moved = [n for n in side.data_inputs(number) if n not in of]
        firsts.append([(side.values[n].size, _first_apart(side, of, n)) for n in moved])
    pairs = ((r, p) for (a, r), (b, p) in product(*firsts) if a == b)
    return next(pairs, None)


def _find_rearranged(
    theirs: tuple[RecordedTape, int], ours: tuple[LiveTape, int], known: Known,
    rows: dict[int, np.ndarray], met: Met,
) -> tuple[int, int] | None:  # fmt: skip
    """Finds the operations that give two operations the same elements in another order; None where
    the order is the same, or one program computes the elements in an order of its own."""
    (reference, r), (port, p) = theirs, ours
    for i, j in product(port.data_inputs(p), reference.data_inputs(r)):
        axes = [len(side.values[n].shape) for side, n in ((reference, j), (port, i))]
        if j in met.get(i, ()) and "float" in port.values[i].dtype and max(axes) <= AXES:
            found = _find_movers((reference, j), (port, i), known, rows)
            if found:
                return found
    return None


def _find_movers(
    theirs: tuple[RecordedTape, int], ours: tuple[LiveTape, int], known: Known,
    rows: dict[int, np.ndarray],
) -> tuple[int, int] | None:  # fmt: skip
    """Finds what puts the elements of two values, which are alike, in different orders."""
    (reference, j), (port, i) = theirs, ours

    def agree(r: int, p: int) -> bool:
        shape, row = reference.values[r].shape, known.rows[r]
        return _is_in_order(port.value_of({}, p), shape, row, known.tolerance)

    if agree(j, i):
        return None
    p = _first_moved(port, i, rows, known.tolerance, lambda n: agree(j, n))
    if p is None:
        return None
    r = _first_moved(reference, j, known.rows, known.tolerance, lambda n: agree(n, i))
    return j if r is None else r, p


def _first_moved(
    side: SideTape, number: int, rows: dict[int, np.ndarray], tolerance: float,
    is_in_order: Callable[[int], bool],
) -> int | None:  # fmt: skip
    """Finds the first value above one that has its elements in another order; None where nothing
    above has them in the other program's."""
    while len(inputs := side.data_inputs(number)) == 1 and inputs[0] in rows:
        if not are_alike(rows[inputs[0]][None], rows[number], tolerance)[0]:
            return None
        if is_in_order(inputs[0]):
            return number
        (number,) = inputs
    return number if side.values[number].op in JOINS else None


def _is_in_order(x: np.ndarray, shape: Shape, row: np.ndarray, tolerance: float) -> bool:
    """Says if a value is the reference's but for the order of whole axes, and for axes that one
    side has joined.

    Args:
        shape: of the reference's value.
        row: its fingerprint.
    """
    for y in _orders(x.squeeze(), tuple(length for length in shape if length > 1)):
        if np.allclose(ordered(y), row[SEES_ORDER], rtol=0, atol=tolerance * row[3]):
            return True
    return False


def _orders(x: np.ndarray, shape: Shape) -> Iterator[np.ndarray]:
    """Yields an array's elements with its axes, or those of a finer shape, in each order."""
    if len(shape) > x.ndim:
        for axes in permutations(range(len(shape))):
            split = tuple(shape[axis] for axis in axes)
            if _is_nested(split, x.shape):
                yield x.reshape(split).transpose(np.argsort(axes))
    else:
        for axes in permutations(range(x.ndim)):
            turned = x.transpose(axes)
            if _is_nested(turned.shape, shape):
                yield turned


def _is_nested(fine: Shape, coarse: Shape) -> bool:
    """Says if one shape is another with some of its axes parted."""
    return {*accumulate(fine, mul)} >= {*accumulate(coarse, mul)}


def _alive(
    side: SideTape, met: set[int], cut: set[int], rows: dict[int, np.ndarray], tolerance: float
) -> set[int]:
    """Finds the values from which some value that both sides have is made."""
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
    """Finds the first value on the way to one that the other side lacks, made of what it has."""
    reached, stack, firsts = {end}, [end], []
    while stack:
        n = stack.pop()
        apart = [i for i in side.data_inputs(n) if i not in alive]
        if not apart:
            firsts.append(n)
        stack += [i for i in apart if i not in reached]
        reached |= set(apart)
    return min(firsts, key=lambda n: (not side.values[n].line, n))
