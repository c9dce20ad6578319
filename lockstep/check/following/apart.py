"""Where the values of two programs part: an operation on each side."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, permutations, product
from operator import mul

import numpy as np

from lockstep.check.following.difference import (
    Cause,
    OperationAt,
    are_given_the_same,
    find_difference,
    find_function,
)
from lockstep.check.following.tapes import Known, LiveTape, RecordedTape, SideTape, are_alike
from lockstep.check.layout import Shape
from lockstep_recorder.operations import COLUMNS, SEES_ORDER, ordered

AXES = 5  # of a value whose orders are tried
# Operations that only move, copy or join elements, as torch and JAX call them.
JOINS = {"cat", "concatenate", "stack"}
MOVES = JOINS | {
    "alias", "broadcast_in_dim", "clone", "constant_pad_nd", "copy", "dynamic_slice", "expand",
    "expand_dims", "flip", "gather", "index", "index_select", "narrow", "pad", "permute", "repeat",
    "reshape", "rev", "roll", "select", "slice", "split", "split_with_sizes", "squeeze", "t",
    "tile", "transpose", "unbind", "unsqueeze", "view",
}  # fmt: skip
IN_FLOAT32 = 1e-6  # relative: of a buffer that one side made in float32
CASTS = {"convert_element_type", "_to_copy"}
INDEXED = {"gather", "dynamic_slice", "scatter", "scatter-add"}  # JAX reads or writes at an index
WRAPPED = 8  # operations behind an index among which its use is sought
LARGEST = ("amax", "max", "reduce_max")
STOPS = ("detach", "stop_gradient")  # operations that stop a gradient


@dataclass(frozen=True)
class PartedAt:
    """A place where the values of the two programs part: an operation on each side.

    Attributes:
        reference: FILE:LINE and its text.
        operations: the name of each, the shapes of its inputs, its attributes.
        number: on the reference's tape.
        given: on the reference's tape, the value that is right there.
        hidden: on the reference's tape, values behind these operations that were not compared.
        near: the operations are given other values, or one program lacks one: what is wrong is
            near these lines, and perhaps at none of them.
        hints: what else is known of what they are given.
        cause: what the operations show, where they are given the same.
        callers: of each line, those from which its function is called, if it is from others.
    """

    reference: str
    port: str
    operations: tuple[str, str] = ("", "")
    number: int = -1
    given: int = -1
    hidden: frozenset[int] = frozenset()
    near: bool = False
    hints: tuple[str, ...] = ()
    callers: tuple[tuple[str, ...], ...] = ((), ())
    cause: Cause | None = None


def part_at(reference: SideTape, r: int, port: SideTape, p: int) -> PartedAt:
    """Tells two operations, by their numbers."""
    told = reference.tell(_user_of_index(reference, r)), port.tell(_user_of_index(port, p))
    callers = reference.callers(r), port.callers(p)
    return PartedAt(reference.line(r), port.line(p), told, r, callers=callers)


def _user_of_index(side: SideTape, number: int) -> int:
    """Finds what reads or writes at an index, where an operation only makes a negative index
    positive, as JAX does by a comparison, a sum and a choice; else returns the operation."""
    if side.is_float(number) or side.values[number].op not in {"lt", "add", "select_n"}:
        return number
    users = (n for n in side.below(number, WRAPPED) if side.values[n].op in INDEXED)
    user = next(users, number)
    return user if side.values[user].line == side.values[number].line else number


Met = dict[int, list[int]]  # the port's value -> those of the reference
Rows = dict[int, np.ndarray]  # a value -> its fingerprint


class Apart:
    """Finds where the values of two programs part, from those that a walk has found alike so far.

    Args:
        known: the reference's values.
        rows: the fingerprints of the port's.
        met: values that are alike.
        replaced: the port's values in whose place the reference's were put.
    """

    def __init__(
        self, reference: RecordedTape, port: LiveTape, known: Known, rows: Rows, met: Met,
        replaced: dict[int, int],
    ) -> None:  # fmt: skip
        self.reference, self.port, self.known = reference, port, known
        self.rows, self.met = rows, met
        put = set(replaced.values()), set(replaced)
        theirs = {n for found in met.values() for n in found}
        ours = {n for n, found in met.items() if found}
        self.alive = (
            _alive(reference, theirs, put[0], known.rows, known.tolerance) | put[0],
            _alive(port, ours, put[1], rows, known.tolerance) | put[1],
        )

    def first(self, meeting: int, number: int) -> tuple[int, int]:
        """Finds the operations behind which values part on the way to an operation."""
        r, p = (_first_apart(side, _with_moved(side, alive), n)
                for side, alive, n in zip((self.reference, self.port), self.alive,
                                          (meeting, number)))  # fmt: skip
        return r, p

    def tell(self, r: int, p: int, given: int = -1) -> PartedAt:
        """Tells the operations behind which values part.

        Where both are given the same elements in another order, such as heads that are split
        otherwise, the operations that put them there are told instead.

        Args:
            given: the reference's value that is right there.
        """
        reference, port, known, rows, met = (
            self.reference, self.port, self.known, self.rows, self.met
        )  # fmt: skip
        here = (reference, r), (port, p)
        hints: list[str] = []
        moved = (_find_rearranged(*here, known, rows, met)
                 or _find_constants(*here, self.alive, known.tolerance, hints)
                 or _find_moved(*here, self.alive) or _find_chosen(*here, met))  # fmt: skip
        near = moved is None and not are_given_alike(*here, met)
        r_shown, p_shown = moved or (r, p)
        near |= (r_shown == r) != (p_shown == p)  # one side's constant is a buffer
        shown = OperationAt(reference, r_shown, known.rows), OperationAt(port, p_shown, rows)
        cause = find_difference(*shown, known.tolerance)
        operands = port.data_inputs(p_shown)
        if not cause and len(operands) == 1 and are_given_the_same(*shown, known.tolerance):
            x = port.value_of({}, operands[0])
            cause = find_function(*shown, x, known.tolerance)
        part = part_at(reference, r_shown, port, p_shown)
        return replace(part, number=r, given=given, near=near, hints=tuple(hints), cause=cause)


def are_given_alike(theirs: tuple[SideTape, int], ours: tuple[SideTape, int], met: Met) -> bool:
    """Says if two operations are given the same data, and it is no part of a value: another part
    may have been chosen."""
    if any(_chosen(ours[0], number) is not None for number in ours[0].data_inputs(ours[1])):
        return False
    inputs = [set(side.data_inputs(number)) for side, number in (theirs, ours)]
    pairs = [(j, i) for i in inputs[1] for j in inputs[0] & set(met.get(i, ()))]
    return {j for j, _ in pairs} == inputs[0] and {i for _, i in pairs} == inputs[1]


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


def _find_chosen(
    theirs: tuple[SideTape, int], ours: tuple[SideTape, int], met: Met
) -> tuple[int, int] | None:
    """Finds what chooses another part of a value for two operations of one input each, such as
    another gate; None where these are given the same part, or no part."""
    found = []
    for side, number in (theirs, ours):
        inputs = side.data_inputs(number)
        chosen = _chosen(side, inputs[0]) if len(inputs) == 1 else None
        if chosen is None:
            return None
        found.append((inputs[0], chosen))
    (j, r), (i, p) = found
    same_size = theirs[0].values[j].size == ours[0].values[i].size
    return (r, p) if same_size and j not in met.get(i, ()) else None


def _chosen(side: SideTape, number: int) -> int | None:
    """Finds the operation that takes a value as a part of another; None where none does."""
    while side.values[number].op in {"seen through", *MOVES}:
        source = side.data_inputs(number)[0]
        if side.values[source].size > side.values[number].size:
            return number
        number = source
    return None


def _find_constants(
    theirs: tuple[RecordedTape, int], ours: tuple[LiveTape, int], alive: tuple[set[int], set[int]],
    tolerance: float, hints: list[str],
) -> tuple[int, int] | None:  # fmt: skip
    """Finds the operations that make other constants for two operations, such as weights of a first
    state of zeros, or a time; on a side that keeps it in a buffer, the operation itself. None where
    one of the two has no constant of its own. Adds a hint for each constant that no line makes."""
    reference, port = theirs[0], ours[0]
    computed = dict(zip(port.constants, port.play({}, port.constants)))
    rows_of = reference.constant_rows | reference.buffer_rows, computed | port.buffer_rows
    given = (_constants_given(*theirs, alive[0], rows_of[0]),
             _constants_given(*ours, alive[1], rows_of[1]))  # fmt: skip
    kept_any = reference.buffer_rows or port.buffer_rows
    tolerance = max(tolerance, IN_FLOAT32) if kept_any else tolerance
    lacking = [[n for n, row in mine.items()
                if not any(_is_one_constant(row, x, tolerance) for x in others.values())]
               for mine, others in (given, given[::-1])]  # fmt: skip
    above: list[Rows] = []
    sides = reference, port
    for side, numbers, rows in zip(sides, lacking, rows_of):
        above.append({n: rows[n] for n in sorted(side.above(numbers)) if n in rows})
    alike = [_alike_or_made_into(sides[k], above[k], above[1 - k], tolerance) for k in (0, 1)]
    unmade = [[n for n in rows
               if side.values[n].op == "constant" and rows[n][0] > 1 and n not in there]
              for side, rows, there in zip(sides, above, alike)]  # fmt: skip
    for word, side, numbers in zip(("reference", "port"), sides, unmade):
        hints += [f"the {word} has a constant of {side.values[n].shape} here that the other side "
                  "has not; no line that runs on tensors makes it: look at NumPy's"
                  for n in numbers[:1]]  # fmt: skip
    untold = [rows.keys() <= side.buffer_rows.keys() or bool(numbers)
              for side, rows, numbers in zip(sides, above, unmade)]  # fmt: skip
    r = _first_lacking(reference, above[0], alike[0], untold[1])
    p = _first_lacking(port, above[1], alike[1], untold[0])
    if (r is None) != (p is None) and all(lacking):
        r, p = (theirs[1] if r is None else r), (ours[1] if p is None else p)
    return None if r is None or p is None else (r, p)


def _constants_given(side: SideTape, number: int, alive: set[int], rows: Rows) -> Rows:
    """Returns the constants of several elements that an operation is given, or that are moved or
    joined with what it is given."""
    found, stack = [], [number]
    while stack:
        for n in side.inputs(stack.pop()):
            if n in rows and rows[n][0] > 1:
                found.append(n)
            elif side.is_data(n) and side.values[n].op in MOVES and n not in alive:
                stack.append(n)
    return {n: rows[n] for n in found}


def _is_one_constant(a: np.ndarray, b: np.ndarray, tolerance: float) -> bool:
    """Says if two constants are alike, or one repeats the other, such as a number throughout."""
    return bool(are_alike(_of_one(a)[None], _of_one(b), tolerance)[0])


def _of_one(row: np.ndarray) -> np.ndarray:
    """Returns a fingerprint for each element: how often all are repeated does not change it."""
    return np.concatenate([row[:5] / max(row[0], 1), row[5:]])


def _alike_or_made_into(side: SideTape, rows: Rows, others: Rows, tolerance: float) -> set[int]:
    """Finds which of some constants, in order, are among others, or are made into one that is."""
    known = [_of_one(row) for row in others.values()]
    table = Known([*range(len(known))], np.array(known).reshape(-1, COLUMNS), tolerance)
    found: set[int] = set()
    for n in reversed(rows):
        if table.find(_of_one(rows[n])) or not found.isdisjoint(side.users[n]):
            found.add(n)
    return found


def _first_lacking(side: SideTape, rows: Rows, alike: set[int], untold: bool) -> int | None:
    """Finds the operation that makes the first of some constants, in order, that is not among
    those of the other side; else the last that makes one, as where nothing tells how the others
    were made."""
    made = [n for n in rows if side.values[n].line and side.values[n].op not in MOVES | CASTS]
    lacking = () if untold else (n for n in made if n not in alike)
    return next(iter(lacking), made[-1] if made else None)


def _find_rearranged(
    theirs: tuple[RecordedTape, int], ours: tuple[LiveTape, int], known: Known,
    rows: dict[int, np.ndarray], met: Met,
) -> tuple[int, int] | None:  # fmt: skip
    """Finds the operations that give two operations the same elements in another order; None where
    the order is the same, or one program computes the elements in an order of its own."""
    (reference, r), (port, p) = theirs, ours
    for i, j in product(port.data_inputs(p), reference.data_inputs(r)):
        axes = [len(side.values[n].shape) for side, n in ((reference, j), (port, i))]
        whole = j in met.get(i, ()) and reference.values[j].size == port.values[i].size
        if whole and "float" in port.values[i].dtype and max(axes) <= AXES:
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
    """Finds the values that both sides have, and those of which such a value is made."""
    found: set[int] = set()
    for n in reversed(side.data):
        users = (user for user in side.users[n] if user in found)
        if n in met or (
            n not in cut
            and any(
                not _is_coarse(side, user, n, rows) and _depends(side, user, n, rows, tolerance)
                for user in users
            )
        ):
            found.add(n)
    for n in side.data:  # such as x + y, where y is zero by mistake
        if n in found and side.is_float(n):
            others = [i for i in side.data_inputs(n) if i not in found and side.is_float(i)]
            if any(not _depends(side, n, i, rows, tolerance) for i in others):
                found.remove(n)
    return found


def _is_coarse(side: SideTape, user: int, number: int, rows: dict[int, np.ndarray]) -> bool:
    """Says if a value is made of many other numbers, too: whether a number is positive, the largest
    one, and what is one number throughout, such as zeros behind a ReLU."""
    row = rows.get(user)
    blank = row is not None and row[0] > 1 and row[5] == row[6]
    smaller = side.values[user].size < side.values[number].size
    largest = smaller and side.values[user].op in LARGEST
    return bool(blank) or largest or (side.is_float(number) and not side.is_float(user))


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
