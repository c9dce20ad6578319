"""Causes that two operations show.

Both are given the same values, element by element, so what differs between the operations is why
their results do: a number, an option, their kind, the order of their operands, an operation before
one of them that the other side lacks, or the activation that they begin.
"""

from dataclasses import dataclass

import numpy as np

from lockstep.check.following.tapes import SideTape, are_alike
from lockstep.check.functions import ACTIVATIONS, LINES
from lockstep_recorder.operations import COLUMNS, SEES_ORDER, fingerprint

SCALARS = {"self": 0, "other": 1, "exponent": 1, "y": 1}  # torch's names of operands, their places
ARITHMETIC = {"add", "sub", "mul", "div", "pow"}  # what torch and JAX call by one name
OPTIONS = 2  # that are told
# Of JAX's operations: how they compute, and not what; nothing in float64 depends on them.
HOW = {"precision", "preferred_element_type", "out_sharding", "accuracy", "unique_indices",
       "indices_are_sorted", "is_stable"}  # fmt: skip
ALIKE = 1e-11  # relative: of numbers, which a tape has with twelve digits

Options = dict[str | int, str]  # by name; of a number, by its place among the operands


@dataclass(frozen=True)
class Cause:
    """Says what the port does otherwise, and what mends it."""

    entry: str  # of the catalogue
    text: str
    remedy: str


@dataclass(frozen=True)
class OperationAt:
    """An operation on a side's tape, with the fingerprints of the values there."""

    side: SideTape
    number: int
    rows: dict[int, np.ndarray]

    @property
    def op(self) -> str:
        return self.side.values[self.number].op

    @property
    def operands(self) -> list[int]:
        """Values that are given, but for single numbers, which are options here."""
        inputs = self.side.values[self.number].inputs
        return [n for n in inputs if "value" not in self.side.values[n].attributes]

    @property
    def options(self) -> Options:
        value = self.side.values[self.number]
        places = SCALARS if value.op in ARITHMETIC else {}
        found: Options = {places.get(name, name): x for name, x in value.attributes.items()}
        for at, n in enumerate(value.inputs):
            if "value" in self.side.values[n].attributes:
                found[at] = self.side.values[n].attributes["value"]
        return found

    def at(self, number: int) -> "OperationAt":
        return OperationAt(self.side, number, self.rows)

    def tell(self) -> str:
        options = [_tell(name, x) for name, x in self.options.items()]
        return " ".join([self.op, *options])


def find_difference(theirs: OperationAt, ours: OperationAt, tolerance: float) -> Cause | None:
    """Finds what alone differs between two operations; None where they are not given the same, or
    their names do not tell what they do.

    Args:
        tolerance: relative.
    """
    if extra := _find_before(theirs, ours, tolerance):
        return Cause("operation left out", f"{extra} is left out", f"here: {extra}")
    if extra := _find_before(ours, theirs, tolerance):
        text = f"{extra}, which the reference has not"
        return Cause("operation too many", text, f"leave out {extra}")
    if not _are_named_alike(theirs, ours):
        return None
    names = _other_options(theirs, ours)
    if not are_given_the_same(theirs, ours, tolerance):
        turned = theirs.op == ours.op and not names and len(theirs.operands) == 2
        if turned and are_given_the_same(theirs, ours, tolerance, turned=True):
            text = f"{ours.op} has its operands exchanged"
            return Cause("operands exchanged", text, "exchange them here")
        return None
    if theirs.op != ours.op:
        whole = all(map(theirs.side.is_data, theirs.operands)) and not names
        text = f"{ours.op}, for {theirs.op}"
        return Cause("another operation", text, f"here: {theirs.op}") if whole else None
    if not 0 < len(names) <= OPTIONS:
        return None
    numbers = all(isinstance(name, int) for name in names)
    b, a = (", ".join(_tell(name, place.options.get(name)) for name in names)
            for place in (ours, theirs))  # fmt: skip
    entry = "another number" if numbers else "another option"
    return Cause(entry, f"{ours.op} {b}, for {a}", f"{theirs.op} {a}")


def find_function(
    theirs: OperationAt, ours: OperationAt, x: np.ndarray, tolerance: float
) -> Cause | None:
    """Finds two activations of one operand, of which each side has the values of one.

    Args:
        x: the operand, as the port has it.
    """
    found = []
    for place in (theirs, ours):
        behind = [
            n for n in place.rows if n >= place.number and place.side.values[n].size == x.size
        ]
        table = np.array([place.rows[n] for n in behind]).reshape(-1, COLUMNS)
        last = (-1, "")  # a sigmoid is a part of what else has its value
        for name, function in ACTIVATIONS.items():
            with np.errstate(all="ignore"):  # what overflows is no value of either side
                alike = are_alike(table, fingerprint(function(x)), tolerance)
            last = max(last, *((n, name) for n, same in zip(behind, alike) if same), (-1, ""))
        found.append(last[1])
    if not all(found) or found[0] == found[1]:
        return None
    line = LINES[ours.side.framework or "torch"].get(found[0], found[0])
    return Cause("activation", f"{found[1]} for {found[0]}", line)


def _find_before(longer: OperationAt, shorter: OperationAt, tolerance: float) -> str:
    """Tells the first of two operations of which the other side has the second alone, on what the
    first is given; "" where there are none."""
    (given, *others) = longer.side.data_inputs(longer.number) or [-1]
    if others or given < 0:
        return ""
    for user in longer.side.users[longer.number]:
        second = longer.at(user)
        if second.op != shorter.op or not _are_named_alike(second, shorter):
            continue
        put = {longer.number: given}
        if not _other_options(second, shorter) and are_given_the_same(
            second, shorter, tolerance, put=put
        ):
            return longer.tell()
    return ""


def _are_named_alike(theirs: OperationAt, ours: OperationAt) -> bool:
    """Says if two operations are of one framework, or of what both call by one name."""
    if "" != theirs.side.framework == ours.side.framework:
        return True
    return ARITHMETIC.issuperset((theirs.op, ours.op)) and all(
        isinstance(name, int) for place in (theirs, ours) for name in place.options
    )


def _other_options(theirs: OperationAt, ours: OperationAt) -> list[str | int]:
    both = theirs.options, ours.options
    names = [name for name in {**both[0], **both[1]} if name not in HOW]
    return [n for n in names if not _is_one(both[0].get(n), both[1].get(n))]


def are_given_the_same(
    theirs: OperationAt, ours: OperationAt, tolerance: float, *, turned: bool = False,
    put: dict[int, int] | None = None,
) -> bool:  # fmt: skip
    """Says if operands that depend on the batch have the same elements in the same places, and
    others the same shape.

    Args:
        turned: the port's operands are taken in the other order.
        put: values of the reference in whose place others are looked at.
    """
    put = put or {}
    operands = [put.get(n, n) for n in theirs.operands], ours.operands[:: -1 if turned else 1]
    if not operands[0] or len(operands[0]) != len(operands[1]):
        return False
    for j, i in zip(*operands):
        if theirs.side.values[j].shape != ours.side.values[i].shape:
            return False
        if not theirs.side.is_data(j) and not ours.side.is_data(i):
            continue
        if j not in theirs.rows or i not in ours.rows:
            return False
        a, b = theirs.rows[j], ours.rows[i]
        if np.abs(a - b)[SEES_ORDER].max() > tolerance * max(a[3], b[3]):
            return False
    return True


def _is_one(a: str | None, b: str | None) -> bool:
    if a is None or b is None:
        return a == b
    try:
        x, y = float(a), float(b)
    except ValueError:
        return a == b
    return abs(x - y) <= ALIKE * max(abs(x), abs(y))


def _tell(name: str | int, value: str | None) -> str:
    if isinstance(name, int):
        return f"{value}"
    return f"{name}={value}" if value is not None else f"the default {name}"
