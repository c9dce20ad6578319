"""A program as a tape of operations, which is played with other values than its own."""

from __future__ import annotations

import linecache
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lockstep_recorder import tree
from lockstep_recorder.user import LIBRARIES

HERE = os.path.dirname(__file__)
# From these the user's functions are called.
OUTSIDE = tuple(os.path.join(HERE, name) for name in ("user.py", "side_torch.py", "side_jax.py"))
COLUMNS = 9  # of a fingerprint
SEES_ORDER = slice(7, 9)  # the columns that change with the order of the elements
STEPS = (0.6180339887498949, 0.7548776662466927)  # of two sequences that fill an interval evenly


@dataclass
class Step:
    """One operation of a tape."""

    name: str
    inputs: list[int]  # numbers of values
    outputs: list[int]
    apply: Callable[[list[Any], bool], list[Any]]  # (values, alone: change none of them)
    attributes: dict[str, str]
    line: str  # FILE:LINE and the text there; "" where no file of the user's is at work


@dataclass
class TapeValue:
    """What a tape begins with, or a step gives."""

    shape: tuple[int, ...]
    dtype: str
    step: int = -1
    origin: str = ""  # parameter, batch or constant
    name: str = ""  # of a parameter
    kept: Any = None  # a constant, or an array of the batch


@dataclass
class Operations:
    """A tape: its values by number, and its steps in order."""

    values: list[TapeValue] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    loss: int = -1

    def begin(self, x: Any, origin: str, name: str = "") -> int:
        """Adds a value that no step gives; returns its number."""
        kept = None if origin == "parameter" else x
        self.values.append(TapeValue(*_form(x), origin=origin, name=name, kept=kept))
        return len(self.values) - 1

    def add(
        self, name: str, inputs: list[int], outputs: list[Any], apply: Callable[..., list[Any]],
        attributes: dict[str, str], line: str,
    ) -> list[int]:  # fmt: skip
        """Adds a step; returns the numbers of its values.

        Args:
            outputs: arrays, or what has their shapes and dtypes.
        """
        first = len(self.values)
        self.values += [TapeValue(*_form(x), step=len(self.steps)) for x in outputs]
        numbers = list(range(first, len(self.values)))
        self.steps.append(Step(name, inputs, numbers, apply, attributes, line))
        return numbers

    def describe(self) -> dict[str, Any]:
        """Returns the tape as JSON."""
        told: list[dict[str, Any]] = []
        for value in self.values:
            about: dict[str, Any] = {"shape": list(value.shape), "dtype": value.dtype}
            if value.step < 0:
                about |= {"op": value.origin, "name": value.name, "inputs": [], "line": ""}
            else:
                step = self.steps[value.step]
                about |= {"op": step.name, "inputs": step.inputs, "line": step.line,
                          "attributes": step.attributes}  # fmt: skip
            told.append(about)
        return {"values": told, "loss": self.loss}


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

        self.users: list[list[int]] = [[] for _ in tape.values]
        for number, value in enumerate(tape.values):
            for i in set(tape.steps[value.step].inputs if value.step >= 0 else ()):
                self.users[i].append(number)

    def start(self, weights: dict[str, np.ndarray]) -> None:
        """Forgets all values but the batch and the constants, and takes these parameters."""
        self.known = {}
        for number, value in enumerate(self.tape.values):
            if value.origin == "parameter" and value.name in weights:
                self.known[number] = self.make(weights[value.name], value)
            elif value.origin in ("batch", "constant"):
                self.known[number] = value.kept

    def play(self, given: dict[int, np.ndarray], targets: list[int]) -> np.ndarray:
        """Puts values in and keeps what they give.

        Returns:
            A row for each target: its fingerprint.
        """
        self._put(given, self.known)
        rows = np.zeros((len(targets), COLUMNS))
        where = {number: row for row, number in enumerate(targets)}

        def look(number: int, x: Any) -> None:  # before a later step changes it in place
            if number in where:
                rows[where[number]] = fingerprint(x)

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
        stack = [user for number in given for user in self.users[number]]
        seen = set(stack)
        while stack:
            number = stack.pop()
            known.pop(number, None)
            stack += [user for user in self.users[number] if user not in seen]
            seen |= set(self.users[number])
        for number, x in given.items():
            known[number] = self.make(x, self.tape.values[number])

    def label(self, names: list[str], numbers: list[int]) -> dict[str, np.ndarray]:
        """Which element of which parameter stands where, in values that only move them.

        Args:
            names: of the parameters, whose elements are counted through in this order.

        Returns:
            By number; an empty array where a value is more than elements that were moved.
        """
        at: dict[str, int] = {}
        total = 0
        for name in names:
            value = next(v for v in self.tape.values if v.name == name)
            at[name] = total
            total += int(np.prod(value.shape, dtype=np.int64))
        found = {}
        for number in numbers:
            try:
                one, two = (self._labelled(number, at, total, turn) for turn in (False, True))
                moved = np.array_equal(one, np.round(one)) and np.array_equal(two, total - one)
            except Exception:  # an operation that takes no such values
                moved = False
            found[str(number)] = one if moved else np.zeros(0)
        return found

    def _labelled(self, number: int, at: dict[str, int], total: int, turned: bool) -> np.ndarray:
        known = {n: x for n, x in self.known.items() if self.tape.values[n].origin == "constant"}
        for n in self._roots(number):
            value = self.tape.values[n]
            if value.origin == "parameter":
                size = int(np.prod(value.shape, dtype=np.int64))
                labels = np.arange(size, dtype=np.float64).reshape(value.shape) + at[value.name]
                known[n] = self.make(total - labels if turned else labels, value)
        self._evaluate([number], known, True)
        return np.asarray(tree.to_numpy(known[number]), np.float64)

    def _roots(self, number: int) -> list[int]:
        seen, stack = {number}, [number]
        while stack:
            value = self.tape.values[stack.pop()]
            inputs = self.tape.steps[value.step].inputs if value.step >= 0 else []
            stack += [n for n in inputs if n not in seen]
            seen |= set(inputs)
        return [n for n in seen if self.tape.values[n].step < 0]

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


def fingerprint(x: Any) -> np.ndarray:
    """Describe a value: its size, what is not finite, six figures that do not see the order of its
    elements, and two that do."""
    try:
        x = np.asarray(x.detach().cpu().resolve_conj() if hasattr(x, "detach") else x)
    except TypeError:
        return np.full(COLUMNS, np.nan)  # such as a random key, which is like nothing
    if x.dtype.kind == "c":
        x = np.abs(x) + 1e-3 * x.real
    if x.dtype.kind not in "fiub" and x.dtype.name != "bfloat16":
        return np.full(COLUMNS, np.nan)
    x = x.astype(np.float64).ravel()
    finite = np.isfinite(x)
    y = x if finite.all() else np.where(finite, x, 0.0)
    ordered = [float(y @ _evenly(y.size, step)) for step in STEPS]
    most = (y.max(), y.min()) if y.size else (0.0, 0.0)
    return np.array([x.size, x.size - finite.sum(), y.sum(), np.abs(y).sum(), y @ y, *most,
                     *ordered])  # fmt: skip


def _evenly(size: int, step: float) -> np.ndarray:
    return np.arange(1, size + 1) * step % 1.0 - 0.5


def is_users(file: str) -> bool:
    """Says if a file is neither a library's nor ours."""
    return not (file.startswith((*LIBRARIES, HERE, "<")) or not file)


def line_of(frames: Iterable[tuple[str, int]]) -> str:
    """FILE:LINE and the text of the innermost frame in the user's files, or "".

    Args:
        frames: (file, line), the innermost first.
    """
    for file, line in frames:
        if file in OUTSIDE:
            break
        if is_users(file):
            text = linecache.getline(file, line).strip()
            return f"{os.path.basename(file)}:{line}  {text}".rstrip()
    return ""
