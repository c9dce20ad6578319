"""One side's tape of operations, as the following sees it: its values, and what they depend on."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Protocol

import numpy as np

from lockstep.check.following.turns import slices
from lockstep.check.layout import Shape
from lockstep.errors import UserError
from lockstep.model.params import Arrays
from lockstep_recorder.graph import Graph
from lockstep_recorder.operations import COLUMNS, fingerprint, labels_of
from lockstep_recorder.recording import prefixed
from lockstep_recorder.wire import group

STACKED = 8  # values that one value may be a stack of
USES = 8  # next values made of a tensor of the batch, among which a line is sought
EQUAL = 1e-9  # relative: of figures whose sums are taken in another order


class Asked(Protocol):
    """A program that answers questions; see `lockstep_recorder.questions`."""

    def ask(
        self, question: str, arrays: Arrays | None = None, **header: Any
    ) -> tuple[dict[str, Any], Arrays]: ...


def held_shape(shape: Iterable[int], dtype: str) -> Shape:
    """Returns the shape of a value's real numbers: a complex one is a pair."""
    return (*shape, 2) if "complex" in dtype else tuple(shape)


@dataclass(frozen=True)
class Computed:
    op: str
    name: str  # of a parameter
    inputs: tuple[int, ...]
    shape: Shape
    dtype: str
    line: str
    attributes: dict[str, str]
    callers: tuple[str, ...] = ()  # lines that call its own, where these are several

    @property
    def held(self) -> Shape:
        return held_shape(self.shape, self.dtype)

    @property
    def size(self) -> int:
        return prod(self.held)


# Attributes of a convolution that reports leave out: usual values, and its layout.
USUAL = {"dilation": "1", "lhs_dilation": "1", "rhs_dilation": "1", "groups": "1",
         "feature_group_count": "1", "batch_group_count": "1", "transposed": "False",
         "output_padding": "0"}  # fmt: skip
LAYOUT = "ConvDimensionNumbers"


def _is_usual(name: str, value: str) -> bool:
    return value.startswith(LAYOUT) or {*re.findall(r"\w+", value)} == {USUAL.get(name)}


class SideTape(Graph):
    """One side's tape: values, and which elements of its tensors they hold.

    Args:
        about: what the recorder tells of it.
        arrays: `elements/NUMBER`, where these are not regular; `cotangents`, rows of a number and
            the fingerprint of its gradient; `constants`, the same of values that are made of
            constants and buffers alone.
    """

    def __init__(self, about: dict[str, Any], arrays: Arrays) -> None:
        self.values = [
            Computed(v["op"], v.get("name", ""), tuple(v["inputs"]), tuple(v["shape"]), v["dtype"],
                  v["line"], v.get("attributes", {}), tuple(v.get("callers", ())))
            for v in about["values"]
        ]  # fmt: skip
        self.loss: int = about["loss"]
        self.framework: str = about.get("framework", "")  # which a trace made before does not tell
        self.names = [v.name for v in self.values if v.op == "parameter"]
        self.numbers = {v.name: n for n, v in enumerate(self.values) if v.op == "parameter"}
        sizes = [self.values[self.numbers[name]].size for name in self.names]
        self.starts = np.concatenate([[0], np.cumsum(sizes)]).astype(int)
        self._elements = {n: v["elements"] for n, v in enumerate(about["values"])
                          if "elements" in v}  # fmt: skip
        self._labels = {int(n): x.astype(np.int64) for n, x in group(arrays, "elements").items()}
        self._frontiers: dict[int, tuple[int, ...]] = {}
        self.cotangents = numbered_rows(arrays, "cotangents")
        self.constant_rows = numbered_rows(arrays, "constants")
        self.buffer_rows: dict[int, np.ndarray] = {}

    def add_buffers(self, buffers: Arrays) -> None:
        """Notes the fingerprints of buffers, and of what holds elements of these alone."""
        flat = np.full(self.starts[-1], np.nan)
        for name, start, stop in zip(self.names, self.starts, self.starts[1:]):
            if name in buffers and np.isrealobj(buffers[name]):
                flat[start:stop] = buffers[name].ravel()
        held = ((n, self.labels(n)) for n in range(len(self.values)) if self.is_pure(n))
        values = {n: flat[labels] for n, labels in held if labels is not None}
        self.buffer_rows = {n: fingerprint(x) for n, x in values.items() if not np.isnan(x).any()}

    def inputs(self, number: int) -> tuple[int, ...]:
        return self.values[number].inputs

    def origins(self) -> list[str]:
        return [value.op for value in self.values]

    def tell(self, number: int) -> str:
        """Describes an operation: its name, the shapes of its inputs, its attributes."""
        value = self.values[number]
        inputs = [self.values[n] for n in value.inputs]
        given = [i.attributes.get("value", str(i.shape)) if i.op == "constant" else str(i.shape)
                 for i in inputs]  # fmt: skip
        items = value.attributes.items()
        attributes = [f"{name}={x}" for name, x in items if not _is_usual(name, x)]
        of = f" of {', '.join(given)}" if given else ""
        return f"{value.op}{of}" + (f"; {', '.join(attributes)}" if attributes else "")

    def line(self, number: int) -> str:
        """Finds the line of an operation, or of the last before it that has one; of the batch,
        that of its first use."""
        return self.values[self._with_line(number)].line

    def callers(self, number: int) -> tuple[str, ...]:
        """Returns the lines from which the line of an operation is called, if it is from others."""
        return self.values[self._with_line(number)].callers

    def _with_line(self, number: int) -> int:
        above = sorted((n for n in self.above([number]) if self.is_data(n)), reverse=True)
        below = self.below(number, USES) if self.values[number].op == "batch" else []
        return next((n for n in (number, *above, *below) if self.values[n].line), number)

    def is_float(self, number: int) -> bool:
        return any(kind in self.values[number].dtype for kind in ("float", "complex"))

    @cached_property
    def users(self) -> dict[int, list[int]]:
        """By value: the values that are made of it, and reach the loss."""
        found: dict[int, list[int]] = {n: [] for n in range(len(self.values))}
        for n in sorted(self.needed):
            for i in set(self.values[n].inputs):
                found[i].append(n)
        return found

    def made_of(self, number: int) -> set[int]:
        """Returns all values that are made of one, and reach the loss."""
        stack, seen = [number], set[int]()
        while stack:
            fresh = [n for n in self.users[stack.pop()] if n not in seen]
            stack += fresh
            seen |= set(fresh)
        return seen

    def below(self, number: int, most: int) -> list[int]:
        """Lists the next values that are made of one, in order."""
        found: list[int] = []
        reached = {number}
        for n in range(number + 1, len(self.values)):
            if n in self.needed and reached & set(self.values[n].inputs):
                reached.add(n)
                found.append(n)
                if len(found) == most:
                    break
        return found

    def data_inputs(self, number: int) -> list[int]:
        return [n for n in self.values[number].inputs if self.is_data(n)]

    def labels(self, number: int) -> np.ndarray | None:
        """Which elements of the parameters a pure value holds, each once; None if it is more."""
        if number not in self._labels and number in self._elements:
            first, *steps = self._elements[number]
            self._labels[number] = labels_of(first, steps, self.values[number].held)
        return self._labels.get(number)

    def frontiers(self, number: int) -> tuple[int, ...]:
        """Finds the last values above an operation that hold elements of parameters unchanged."""
        if number not in self._frontiers:
            found: list[int] = []
            stack = [n for n in self.values[number].inputs if self.is_pure(n)][::-1]
            seen: set[int] = set()
            while stack:
                n = stack.pop()
                if n in seen:
                    continue
                seen.add(n)
                if self.labels(n) is not None:
                    found.append(n)
                else:
                    stack += [i for i in self.values[n].inputs if self.is_pure(i)][::-1]
            self._frontiers[number] = tuple(found)
        return self._frontiers[number]

    def names_of(self, number: int) -> list[str]:
        """Lists the parameters that a value is made of."""
        return [self.values[n].name for n in self.above([number]) if self.values[n].name]


class LiveTape(SideTape):
    """The tape of a program that plays it.

    Args:
        weights: what it is made with.
        batch: `batch/NAME`, and the description of its nest.
        forced: `act/CALL` and `dact/CALL`, where the gradients of its values are wanted, too.
    """

    def __init__(
        self, program: Asked, weights: Arrays, batch: Arrays, spec: Any,
        forced: Arrays | None = None,
    ) -> None:  # fmt: skip
        self.program = program
        given = prefixed("weights", weights) | batch | prefixed("forced", forced or {})
        about, arrays = program.ask("tape", given, batch=spec, gradients=forced is not None)
        super().__init__(about, arrays)
        self.rows = numbered_rows(arrays, "values")

    def start(self) -> None:
        """Forgets all values but the batch and the constants."""
        self.program.ask("tape start")

    def play(
        self, given: dict[int, np.ndarray], targets: list[int], free: Iterable[int] = ()
    ) -> np.ndarray:
        """Puts values in and keeps what follows; returns the targets' fingerprints.

        Args:
            free: values that were put in, and are the program's own again.
        """
        arrays = {f"given/{n}": x for n, x in given.items()}
        _, found = self.program.ask("tape play", arrays, targets=targets, free=list(free))
        return found["fingerprints"].reshape(-1, COLUMNS)

    def attempt(self, trials: list[dict[int, np.ndarray]], targets: list[int]) -> np.ndarray:
        """Returns the targets' fingerprints for each trial: (trials, targets, columns)."""
        found = self._attempt(trials, targets, False)
        rows = [found[str(k)] for k in range(len(trials))]
        return np.array(rows).reshape(len(trials), len(targets), COLUMNS)

    def value_of(self, given: dict[int, np.ndarray], number: int) -> np.ndarray:
        return self._attempt([given], [number], True)[f"0/{number}"]

    def values_of(
        self, trials: list[dict[int, np.ndarray]], targets: list[int]
    ) -> dict[int, list[np.ndarray]]:
        """Returns each target's value in each trial."""
        found = self._attempt(trials, targets, True)
        return {n: [found[f"{k}/{n}"] for k in range(len(trials))] for n in targets}

    def stacks(self, numbers: list[int], known: "Known") -> dict[int, list[int]]:
        """Returns those of some values that are stacks of the other side's, and these."""
        targets = [n for n in numbers if self.is_float(n)
                   and known.stacked_axes(self.values[n].shape)]  # fmt: skip
        values = self.values_of([{}], targets) if targets else {}
        found = {n: known.find_stacked(x) for n, (x,) in values.items()}
        return {n: members for n, members in found.items() if members}

    def _attempt(
        self, trials: list[dict[int, np.ndarray]], targets: list[int], values: bool
    ) -> Arrays:
        arrays = {f"given/{k}/{n}": x for k, each in enumerate(trials) for n, x in each.items()}
        return self.program.ask(
            "tape attempt", arrays, targets=targets, trials=len(trials), values=values
        )[1]


class RecordedTape(SideTape):
    """The tape of a trace, with the fingerprints of its values.

    Args:
        arrays: those of the trace, some of which are values of the tape.

    Raises:
        UserError: the trace has none.
    """

    def __init__(self, about: dict[str, Any], arrays: Arrays) -> None:
        if "values" not in about:
            raise UserError(about.get("lacks", "the trace has no tape; record it again"))
        own = group(arrays, "tape")
        super().__init__(about, own)
        self.rows = own["rows"].reshape(-1, COLUMNS)
        self._marginals = {int(n): x for n, x in group(own, "marginals").items()}
        self._kept = {int(n): x for n, x in group(own, "value").items()}
        self._kept |= {n: arrays[v["kept"]] for n, v in enumerate(about["values"]) if "kept" in v}

    def value_of(self, number: int) -> np.ndarray | None:
        """Returns a value, where the trace has it."""
        x = self._kept.get(number)
        return None if x is None else x.reshape(self.values[number].held)

    def marginals_of(self, number: int) -> list[np.ndarray]:
        """Returns the rows of each axis of a value, where the trace has them."""
        found = self._marginals.get(number)
        return [] if found is None else axes_of(found, self.values[number].shape)

    def pieces(self, number: int, size: int) -> np.ndarray:
        """Returns the fingerprints of a value's slices of a size, see `slices`; both columns that
        see order are zero."""
        rows = []
        for along in self.marginals_of(number):
            length, rest = divmod(len(along) * size, max(self.values[number].size, 1))
            for indices in slices(len(along), length) if not rest else ():
                rows.append(row_of(along[indices], size))
        return np.array(rows, np.float64).reshape(-1, COLUMNS)


def row_of(along: np.ndarray, size: int) -> np.ndarray:
    """Returns the fingerprint of some indices of an axis by their marginals; the two columns that
    see order are zero."""
    sums, most, least = along[:, :4].sum(0), along[:, 4].max(), along[:, 5].min()
    return np.array([size, *sums, most, least, 0, 0], np.float64)


def numbered_rows(arrays: Arrays, name: str) -> dict[int, np.ndarray]:
    """Returns rows by the numbers that they begin with."""
    rows = arrays.get(name, np.zeros(0)).reshape(-1, 1 + COLUMNS)
    return {int(row[0]): row[1:] for row in rows}


def axes_of(marginals: np.ndarray, shape: Shape) -> list[np.ndarray]:
    """Parts marginals by axes."""
    return np.split(marginals, np.cumsum(shape)[:-1]) if shape else []


def order_between(ours: np.ndarray, theirs: np.ndarray, tolerance: float) -> np.ndarray | None:
    """Finds which of the reference's indices stands at each of the port's along an axis; None where
    these are others, cannot be told from one another, or are in the same order. Those that are
    alike in all figures, such as units that a ReLU switches off, keep their order."""
    if ours.shape != theirs.shape:
        return None
    scale = tolerance * max(np.abs(ours).max(initial=0), np.abs(theirs).max(initial=0))
    a, b = (np.argsort(side[:, 1], kind="stable") for side in (ours, theirs))
    steps = np.abs(np.diff(theirs[b], axis=0))
    told = (steps[:, 1] > 2 * scale) | (steps == 0).all(1)
    if not told.all() or not np.allclose(ours[a], theirs[b], rtol=0, atol=scale):
        return None
    order = np.empty(len(a), np.int64)
    order[a] = b
    return None if (a == b).all() else order


def problem_of(about: dict[str, Any], arrays: Arrays, shapes: dict[str, Shape]) -> str:
    """Says why what a trace says of its tape is none, or "".

    Args:
        about: JSON.
        arrays: those of the trace.
        shapes: of its weights.
    """
    if "values" not in about:
        return "" if type(about.get("lacks", "")) is str else "lacks of the tape is no reason"
    values = about["values"]
    if type(values) is not list or not all(map(_is_value, values)):
        return "the tape holds more than values"
    if not all(i < n for n, v in enumerate(values) for i in v["inputs"]):
        return "the tape has values of later ones"
    if type(about.get("loss")) is not int or not 0 <= about["loss"] < len(values):
        return "the tape has no loss"
    named = [v for v in values if v["op"] == "parameter"]
    if len({v.get("name") for v in named}) < len(named) or not all(
        shapes.get(v.get("name", "")) == tuple(v["shape"]) for v in named
    ):
        return "the tape's parameters are not the weights"
    if type(about.get("framework", "")) is not str:
        return "framework of the tape is no name"
    total = sum(prod(v["shape"]) for v in named)
    for v in values:
        held = held_shape(v["shape"], v["dtype"])
        if "elements" in v and not _is_within(v["elements"], held, total):
            return "the tape has elements of no parameter"
        if "kept" in v and getattr(arrays.get(v["kept"]), "size", None) != prod(held):
            return "the tape's arrays are not those of the trace"
    own = group(arrays, "tape")
    for kind in ("elements", "marginals", "value"):
        for name, x in group(own, kind).items():
            if not name.isdecimal() or len(name) > 9 or not int(name) < len(values):
                return f"tape/{kind}/{name} is of no value"
            value = values[int(name)]
            held = held_shape(value["shape"], value["dtype"])
            marginals = sum(value["shape"]), COLUMNS - 3
            if x.shape != (marginals if kind == "marginals" else held):
                return f"tape/{kind}/{name} is of no value"
            if kind == "elements" and not ((x >= 0) & (x < total)).all():
                return "the tape has elements of no parameter"
    for kind, told in (("cotangents", "gradients"), ("constants", "constants")):
        rows = own.get(kind, np.zeros((0, 1 + COLUMNS)))
        if rows.shape[1:] != (1 + COLUMNS,) or not set(rows[:, 0]) <= {*range(len(values))}:
            return f"the tape has {told} of no value"
    count = len(SideTape(about, own).data)
    return "" if "rows" in own and own["rows"].shape == (count, COLUMNS) else "the tape has no rows"


def _is_value(v: Any) -> bool:
    kinds: dict[str, type] = {"op": str, "inputs": list, "shape": list, "dtype": str, "line": str}
    if type(v) is not dict or any(type(v.get(name)) is not kind for name, kind in kinds.items()):
        return False
    counts = [*v["inputs"], *v["shape"]]
    return (
        all(type(n) is int and 0 <= n < 2**40 for n in counts)
        and len(v["shape"]) <= 32
        and all(type(v.get(name, "")) is str for name in ("name", "kept"))
        and type(v.get("attributes", {})) is dict
        and type(v.get("callers", [])) is list
        and all(type(line) is str for line in v.get("callers", []))
    )


def _is_within(elements: Any, shape: Shape, total: int) -> bool:
    if type(elements) is not list or len(elements) != len(shape) + 1 or prod(shape) > total:
        return False
    if not all(type(n) is int for n in elements):
        return False
    first, *steps = elements
    ends = [step * (length - 1) for step, length in zip(steps, shape)]
    low, high = (first + sum(pick(end, 0) for end in ends) for pick in (min, max))
    return prod(shape) > 0 and 0 <= low <= high < total


class Known:
    """The fingerprints of one side's values, to be looked up."""

    def __init__(self, numbers: list[int], rows: np.ndarray, tolerance: float = EQUAL) -> None:
        self.tolerance = tolerance
        self.rows = dict(zip(numbers, rows))
        self.by_size: dict[int, list[int]] = {}
        for n, row in self.rows.items():
            if not np.isnan(row).any():
                self.by_size.setdefault(int(row[0]), []).append(n)
        self.tables = {
            size: np.array([self.rows[n] for n in numbers])
            for size, numbers in self.by_size.items()
        }

    def find(self, row: np.ndarray) -> list[int]:
        """Finds the values that have the same elements, in any order."""
        return self.find_each(row[None])[0]

    def stacked_axes(self, shape: Shape) -> list[int]:
        """Finds the axes along which a value of a shape may be a stack of these."""
        return [axis for axis, length in enumerate(shape)
                if 1 < length <= STACKED and prod(shape) // length in self.tables]  # fmt: skip

    def find_stacked(self, x: np.ndarray) -> list[int]:
        """Finds the values that one is a stack of, such as those of an ensemble's members."""
        for axis in self.stacked_axes(x.shape):
            rows = np.array([fingerprint(part) for part in np.moveaxis(x, axis, 0)])
            found = self.find_each(rows)
            if all(found) and not any(row[5] == row[6] for row in rows if row[0] > 1):
                return [n for each in found for n in each]
        return []

    def find_each(self, rows: np.ndarray) -> list[list[int]]:
        """Finds the values that have the same elements as each of these, in any order."""
        found: list[list[int]] = [[] for _ in rows]
        finite = ~np.isnan(rows).any(1)
        for size in self.tables.keys() & set(rows[finite, 0]):
            table, numbers = self.tables[size], self.by_size[size]
            chosen = np.flatnonzero(finite & (rows[:, 0] == size))
            sums, scales = (np.meshgrid(table[:, k], rows[chosen, k]) for k in (2, 3))
            near = np.abs(sums[0] - sums[1]) <= self.tolerance * np.maximum(*scales)
            ours, theirs = np.nonzero(near)
            alike = are_alike(table[theirs], rows[chosen[ours]], self.tolerance)
            for row, at in zip(chosen[ours[alike]], theirs[alike]):
                found[row].append(numbers[at])
        return found


def are_alike(rows: np.ndarray, row: np.ndarray, tolerance: float = EQUAL) -> np.ndarray:
    """Says if fingerprints are those of the same elements, in any order.

    Args:
        rows: (n, columns)
        row: (columns,), or as many as rows.
    """
    scale = np.maximum(rows[:, 3], row[..., 3])
    largest = np.maximum(np.abs(rows[:, 5:7]).max(1), np.abs(row[..., 5:7]).max(-1))
    square = np.maximum(rows[:, 4], row[..., 4])
    gaps = np.abs(rows - row)
    same = (gaps[:, :2] == 0).all(1)
    same &= (gaps[:, 2] <= tolerance * scale) & (gaps[:, 3] <= tolerance * scale)
    same &= gaps[:, 4] <= 2 * tolerance * square
    return same & (gaps[:, 5:7] <= tolerance * largest[:, None]).all(1)
