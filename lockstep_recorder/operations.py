"""A program as a tape of operations, which is played with other values than its own."""

from __future__ import annotations

import linecache
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from lockstep_recorder import tree
from lockstep_recorder.graph import Graph
from lockstep_recorder.user import FRAMEWORKS, is_users, path_in_library

HERE = os.path.dirname(__file__)
# From these the user's functions are called.
OUTSIDE = tuple(os.path.join(HERE, name) for name in ("user.py", "side_torch.py", "side_jax.py"))
CALLERS = 2  # lines that are told of those from which a function is called, where these are several
COLUMNS = 9  # of a fingerprint
SEES_ORDER = slice(7, 9)  # the columns that change with the order of the elements
STEPS = (0.6180339887498949, 0.7548776662466927)  # of two sequences that fill an interval evenly
SHORT = 2**16  # numbers of each that are kept


@dataclass
class Step:
    """One operation of a tape."""

    name: str
    inputs: list[int]  # numbers of values
    outputs: list[int]
    apply: Callable[[list[Any], bool], list[Any]]  # (values, alone: change none of them)
    attributes: dict[str, str]
    lines: tuple[str, ...]  # see `lines_through`


@dataclass
class TapeValue:
    """A value with which a tape begins, or that a step gives."""

    shape: tuple[int, ...]
    dtype: str
    step: int = -1
    origin: str = ""  # parameter, batch or constant
    name: str = ""  # of a parameter
    kept: Any = None  # a constant, or an array of the batch


@dataclass
class Operations(Graph):
    """A tape: its values by number, and its steps in order.

    Attributes:
        framework: that runs it, and names its operations.
        cotangents: by value: the gradient of the loss with respect to it, of values of which the
            framework has it: none inside of an operation that has its own derivative.
    """

    framework: str = ""
    values: list[TapeValue] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    loss: int = -1
    cotangents: dict[int, Any] = field(default_factory=dict)

    def begin(self, x: Any, origin: str, name: str = "") -> int:
        """Adds a value that no step gives; returns its number."""
        kept = None if origin == "parameter" else x
        self.values.append(TapeValue(*_form(x), origin=origin, name=name, kept=kept))
        return len(self.values) - 1

    def add(
        self, name: str, inputs: list[int], outputs: list[Any], apply: Callable[..., list[Any]],
        attributes: dict[str, str], lines: Sequence[str] = (),
    ) -> list[int]:  # fmt: skip
        """Adds a step; returns the numbers of its values.

        Args:
            outputs: arrays, or what has their shapes and dtypes.
        """
        first = len(self.values)
        self.values += [TapeValue(*_form(x), step=len(self.steps)) for x in outputs]
        numbers = list(range(first, len(self.values)))
        self.steps.append(Step(name, inputs, numbers, apply, attributes, tuple(lines)))
        return numbers

    def begin_parameter(self, x: Any, name: str, of_pairs: Callable[[Any], Any]) -> int:
        """Adds a parameter; a complex one as pairs of reals, and the operation that joins these.

        Args:
            of_pairs: (..., 2) -> complex, in the framework.
        """
        if not _form(x)[1].rpartition(".")[2].startswith("complex"):
            return self.begin(x, "parameter", name)
        pairs = self.begin(np.zeros((*np.shape(x), 2)), "parameter", name)

        def apply(values: list[Any], alone: bool) -> list[Any]:
            return [of_pairs(values[0])]

        return self.add("complex", [pairs], [x], apply, {})[0]

    def inputs(self, number: int) -> list[int]:
        step = self.values[number].step
        return self.steps[step].inputs if step >= 0 else []

    def origins(self) -> list[str]:
        return [value.origin for value in self.values]

    def pure_inputs(self) -> list[int]:
        """Lists the values that meet data and depend on parameters alone."""
        found = [n for m in self.meetings for n in self.inputs(m) if self.is_pure(n)]
        return list(dict.fromkeys(found))

    def describe(self) -> dict[str, Any]:
        """Returns the tape as JSON."""
        told: list[dict[str, Any]] = []
        called_at: dict[tuple[str, ...], set[str]] = {}
        for lines in {step.lines for step in self.steps}:
            for at in range(1, len(lines)):
                called_at.setdefault(lines[:at], set()).add(lines[at])
        for value in self.values:
            about: dict[str, Any] = {"shape": list(value.shape), "dtype": value.dtype}
            if value.step < 0:
                about |= {"op": value.origin, "name": value.name, "inputs": [], "line": ""}
                single = None if value.shape else _as_reals(value.kept)
                if value.origin == "constant" and single is not None and single.size == 1:
                    about["attributes"] = {"value": f"{single.item():.12g}"}
            else:
                step = self.steps[value.step]
                callers = [
                    caller
                    for at, caller in enumerate(step.lines)
                    if at
                    and (len(called_at[step.lines[:at]]) > 1 or is_library_line(step.lines[at - 1]))
                ]
                about |= {"op": step.name, "inputs": step.inputs, "attributes": step.attributes,
                          "line": step.lines[0] if step.lines else ""}  # fmt: skip
                about |= {"callers": callers[:CALLERS]} if callers else {}
            told.append(about)
        return {"framework": self.framework, "values": told, "loss": self.loss}


def _form(x: Any) -> tuple[tuple[int, ...], str]:
    return tuple(map(int, np.shape(x))), str(getattr(x, "dtype", type(x).__name__))


class Player:
    """Plays a tape: values are computed when they are asked for, of those that are given.

    Args:
        make: (numpy array, value) -> the framework's array.
    """

    def __init__(self, tape: Operations, make: Callable[[np.ndarray, TapeValue], Any]) -> None:
        self.tape, self.make = tape, make
        self.known: dict[int, Any] = {}
        self.fixed: set[int] = set()  # what was put in, whatever it is made of
        self.made_of: dict[int, set[int]] = {}  # kept answers of `_below`
        self.users: list[set[int]] = [set() for _ in tape.values]
        for number, value in enumerate(tape.values):
            for i in set(tape.steps[value.step].inputs if value.step >= 0 else ()):
                self.users[i].add(number)

    def start(self, weights: dict[str, np.ndarray]) -> None:
        """Forgets all values but the batch and the constants, and takes these parameters."""
        self.known, self.fixed, self.made_of = {}, set(), {}
        for number, value in enumerate(self.tape.values):
            if value.origin == "parameter" and value.name in weights:
                self.known[number] = self.make(weights[value.name], value)
            elif value.origin in ("batch", "constant"):
                self.known[number] = value.kept

    def play(
        self, given: dict[int, np.ndarray], targets: list[int],
        also: Callable[[int, Any, np.ndarray], None] | None = None, free: Iterable[int] = (),
    ) -> np.ndarray:  # fmt: skip
        """Puts values in and keeps what they give.

        Args:
            free: values that were put in, and are computed again.
            also: is shown each target, its value and its fingerprint.

        Returns:
            A row for each target: its fingerprint.
        """
        self._fix(self.fixed - set(free))
        self._forget(free, self.known)
        self._put(given, self.known)
        self._fix(self.fixed | set(given))
        rows = np.zeros((len(targets), COLUMNS))
        where = {number: row for row, number in enumerate(targets)}

        def look(number: int, x: Any) -> None:  # before a later step changes it in place
            if number in where:
                rows[where[number]] = row = fingerprint(x)
                if also:
                    also(number, x, row)

        for number in [number for number in targets if number in self.known]:
            look(number, self.known[number])
        self._evaluate(targets, self.known, False, look)
        return rows

    def attempt(self, given: dict[int, np.ndarray], targets: list[int]) -> list[Any]:
        """Returns the targets' values were these given; nothing is kept."""
        known = dict(self.known)
        self._put(given, known)
        self._evaluate(targets, known, True)
        return [known[number] for number in targets]

    def _put(self, given: dict[int, np.ndarray], known: dict[int, Any]) -> None:
        """Puts values in, and forgets what was made of the former ones."""
        self._forget(given, known)
        for number, x in given.items():
            known[number] = self.make(x, self.tape.values[number])

    def _fix(self, numbers: set[int]) -> None:
        if numbers != self.fixed:
            self.fixed, self.made_of = numbers, {}

    def _forget(self, numbers: Iterable[int], known: dict[int, Any]) -> None:
        """Forgets values, and what was made of them up to what was put in."""
        for number in set[int]().union(*map(self._below, numbers)):
            known.pop(number, None)

    def _below(self, number: int) -> set[int]:
        """Returns a value's number and those of what is made of it, up to what was put in."""
        if number not in self.made_of:
            seen, stack = {number}, [number]
            while stack:
                users = self.users[stack.pop()] - seen - self.fixed
                stack += users
                seen |= users
            self.made_of[number] = seen
        return self.made_of[number]

    def label(self) -> dict[int, np.ndarray]:
        """Finds which element of which parameter stands where, in the values at which data meets
        parameters; where such a value is more than elements that were moved, in those above it.

        Returns:
            By value: numbers of elements, which are counted through the parameters in order.
        """
        known: tuple[dict[int, Any], ...] = ({}, {})
        total = sum(int(np.prod(v.shape, dtype=np.int64)) for v in self._parameters().values())
        at = 0
        for number, value in enumerate(self.tape.values):
            if value.origin == "parameter":
                size = int(np.prod(value.shape, dtype=np.int64))
                labels = np.arange(at, at + size, dtype=np.float64).reshape(value.shape)
                at += size
                for each, x in zip(known, (labels, total - labels)):
                    each[number] = self.make(x, value)
            elif value.origin == "constant":
                known[0][number] = known[1][number] = value.kept
        found: dict[int, np.ndarray | None] = {}
        stack = self.tape.pure_inputs()
        while stack:
            number = stack.pop()
            if number not in found:
                found[number] = self._labelled(number, known, total)
                if found[number] is None:
                    stack += [n for n in self.tape.inputs(number) if self.tape.is_pure(n)]
        return {number: x for number, x in found.items() if x is not None}

    def _parameters(self) -> dict[int, TapeValue]:
        return {n: v for n, v in enumerate(self.tape.values) if v.origin == "parameter"}

    def _labelled(
        self, number: int, known: tuple[dict[int, Any], ...], total: int
    ) -> np.ndarray | None:
        """Moves labels as a value's elements are moved; None where they are more than moved. Those
        of a complex value are pairs."""
        try:
            made = []
            for each in known:
                own = dict(each)
                self._evaluate([number], own, True)
                made.append(np.asarray(tree.to_numpy(own[number]), np.float64))
        except Exception:  # an operation that takes no such values
            return None
        one, two = made
        moved = np.array_equal(one, np.round(one)) and np.array_equal(two, total - one)
        if not moved:
            return None
        value = self.tape.values[number]
        pair = (2,) if "complex" in value.dtype else ()
        labels = one.reshape((*value.shape, *pair)).astype(np.int64)
        once = np.unique(labels).size == labels.size
        return labels if once else None

    def _evaluate(
        self, targets: list[int], known: dict[int, Any], alone: bool,
        look: Callable[[int, Any], None] | None = None,
    ) -> None:  # fmt: skip
        needed: set[int] = set()
        stack = [number for number in targets if number not in known]
        while stack:
            at = self.tape.values[stack.pop()].step
            if at < 0:
                raise KeyError("a parameter that was not given")
            if at not in needed:
                needed.add(at)
                stack += [n for n in self.tape.steps[at].inputs if n not in known]
        for at in sorted(needed):
            step = self.tape.steps[at]
            made = step.apply([known[n] for n in step.inputs], alone)
            for number, x in zip(step.outputs, made):
                if number not in known:
                    known[number] = x
                    if look:
                        look(number, x)


HUGE = 1e140  # what a mask adds in place of infinity, such as the least float, sums to none


def fingerprint(x: Any) -> np.ndarray:
    """Describe a value: its size, what is not finite, six figures that do not see the order of its
    elements, and two that do."""
    found = _as_reals(x)
    if found is None:
        return np.full(COLUMNS, np.nan)
    x = found.ravel()
    finite = np.abs(x) < HUGE
    y = x if finite.all() else np.where(finite, x, 0.0)
    most = (y.max(), y.min()) if y.size else (0.0, 0.0)
    return np.array([x.size, x.size - finite.sum(), y.sum(), np.abs(y).sum(), y @ y, *most,
                     *ordered(y)])  # fmt: skip


def ordered(x: np.ndarray) -> list[float]:
    """Return the two figures of a fingerprint that see the order of the elements."""
    return [float(x.ravel() @ _evenly(x.size, step)) for step in STEPS]


def _as_reals(x: Any) -> np.ndarray | None:
    """A value as float64, a complex one as pairs; None where it is none, such as a random key."""
    try:
        x = np.asarray(x.detach().cpu().resolve_conj() if hasattr(x, "detach") else x)
    except TypeError:
        return None
    x = tree.to_numpy(x)
    if x.dtype.kind not in "fiub" and x.dtype.name != "bfloat16":
        return None
    return x.astype(np.float64)


def marginals(x: Any) -> np.ndarray:
    """Describe a value index by index, along each axis in turn: rows of a fingerprint's columns 1
    to 6. So the fingerprint of each slice is known."""
    found = _as_reals(x)
    if found is None or not found.size:
        return np.zeros((sum(np.shape(x)), COLUMNS - 3))
    finite = np.abs(found) < HUGE
    y = np.where(finite, found, 0.0)
    rows = []
    for axis in range(np.ndim(x)):
        others = tuple(k for k in range(y.ndim) if k != axis)
        columns = ((~finite).sum(others), y.sum(others), np.abs(y).sum(others),
                   (y * y).sum(others), y.max(others), y.min(others))  # fmt: skip
        rows.append(np.stack(columns, -1).astype(np.float64))
    return np.concatenate([np.zeros((0, COLUMNS - 3)), *rows])


def strides_of(labels: np.ndarray) -> list[int] | None:
    """Describe labels as [first, step along each axis]; None where they are not so regular."""
    if not labels.size:
        return None
    first = int(labels.flat[0])
    steps = []
    for axis, length in enumerate(labels.shape):
        at = [0] * labels.ndim
        at[axis] = min(1, length - 1)
        steps.append(int(labels[tuple(at)]) - first)
    regular = np.array_equal(labels, labels_of(first, steps, labels.shape))
    return [first, *steps] if regular else None


def labels_of(first: int, steps: list[int], shape: tuple[int, ...]) -> np.ndarray:
    """Return the labels that `strides_of` describes."""
    found = np.full(shape, first, np.int64)
    for axis, step in enumerate(steps):
        ones = [1] * len(shape)
        ones[axis] = shape[axis]
        found += step * np.arange(shape[axis], dtype=np.int64).reshape(ones)
    return found


def _evenly(size: int, step: float) -> np.ndarray:
    return _start(step)[:size] if size <= SHORT else _sequence(size, step)


@cache
def _start(step: float) -> np.ndarray:
    return _sequence(SHORT, step)


def _sequence(size: int, step: float) -> np.ndarray:
    return np.arange(1, size + 1) * step % 1.0 - 0.5


def lines_of(frames: Iterable[tuple[str, int]]) -> Iterator[str]:
    """Yields FILE:LINE and the text of the frames in the user's files, the innermost first; a
    generator in its function's line is told once.

    Args:
        frames: (file, line), the innermost first.
    """
    former = ("", 0)
    for file, line in frames:
        if file in OUTSIDE:
            break
        if is_users(file) and (file, line) != former:
            former = file, line
            text = linecache.getline(file, line).strip()
            yield f"{os.path.basename(file)}:{line}  {text}".rstrip()


def lines_through(frames: Iterable[tuple[str, int]]) -> Iterator[str]:
    """Yields what `lines_of` does, and before it the innermost line of a library that has the
    user's model: a framework calls it, and the user calls that; einops is called by the user."""
    frames = [*frames]
    of_library, called = "", False
    for file, line in frames:
        if file in OUTSIDE or is_users(file):
            break
        path = path_in_library(file)
        if path.partition("/")[0] in FRAMEWORKS:
            called = bool(of_library)
        elif path and not of_library:
            of_library = f"{path}:{line}  {linecache.getline(file, line).strip()}".rstrip()
    if called:
        yield of_library
    yield from lines_of(frames)


def is_library_line(line: str) -> bool:
    """Says if a line of `lines_through` is a library's: it has the path in its package."""
    return "/" in line.partition(":")[0]


def line_of(frames: Iterable[tuple[str, int]]) -> str:
    """Returns the first of `lines_of`, or ""."""
    return next(lines_of(frames), "")
