"""One side's tape of operations, as the following sees it: its values, and what they depend on."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Protocol

import numpy as np

from lockstep.check.layout import Shape
from lockstep.model.params import Arrays
from lockstep_recorder.operations import COLUMNS
from lockstep_recorder.recording import prefixed

EQUAL = 1e-9  # relative: of figures whose sums are taken in another order
PARAMETER, BATCH = 1, 2
LIMIT = 3_000_000  # elements of all arrays of one question


class Asked(Protocol):
    """A program that answers questions; see `lockstep_recorder.questions`."""

    def ask(
        self, question: str, arrays: Arrays | None = None, **header: Any
    ) -> tuple[dict[str, Any], Arrays]: ...


@dataclass(frozen=True)
class Computed:
    op: str
    name: str  # of a parameter
    inputs: tuple[int, ...]
    shape: Shape
    dtype: str
    line: str
    attributes: dict[str, str]

    @property
    def size(self) -> int:
        return prod(self.shape)


class TapeSide:
    """Asks a program about its tape.

    Args:
        weights: what it starts from.
        batch: `batch/NAME`, and the description of its nest.
    """

    def __init__(self, program: Asked, weights: Arrays, batch: Arrays, spec: Any) -> None:
        self.program = program
        about, _ = program.ask("tape", prefixed("weights", weights) | batch, batch=spec)
        self.values = [
            Computed(v["op"], v.get("name", ""), tuple(v["inputs"]), tuple(v["shape"]), v["dtype"],
                  v["line"], v.get("attributes", {}))
            for v in about["values"]
        ]  # fmt: skip
        self.loss: int = about["loss"]
        self.depends = self._dependences()
        self.names = [v.name for v in self.values if v.op == "parameter"]
        self.numbers = {v.name: n for n, v in enumerate(self.values) if v.op == "parameter"}
        sizes = [self.values[self.numbers[name]].size for name in self.names]
        self.starts = np.concatenate([[0], np.cumsum(sizes)]).astype(int)
        self._labels: dict[int, np.ndarray | None] = {}
        self._frontiers: dict[int, tuple[int, ...]] = {}

    def _dependences(self) -> list[int]:
        found: list[int] = []
        for value in self.values:
            own = {"parameter": PARAMETER, "batch": BATCH}.get(value.op, 0)
            for n in value.inputs:
                own |= found[n]
            found.append(own)
        return found

    def is_pure(self, number: int) -> bool:
        """Says if a value depends on parameters alone."""
        return self.depends[number] == PARAMETER

    def is_data(self, number: int) -> bool:
        """Says if a value depends on the batch."""
        return bool(self.depends[number] & BATCH)

    def is_float(self, number: int) -> bool:
        return any(kind in self.values[number].dtype for kind in ("float", "complex"))

    @cached_property
    def needed(self) -> set[int]:
        """The values that reach the loss."""
        return self.above([self.loss])

    @cached_property
    def data(self) -> list[int]:
        """The values that depend on the batch and reach the loss, in order."""
        return [n for n in sorted(self.needed) if self.is_data(n)]

    @cached_property
    def meetings(self) -> list[int]:
        """Lists the operations at which data meets parameters."""
        return [n for n in self.data if any(map(self.is_pure, self.values[n].inputs))]

    @cached_property
    def users(self) -> dict[int, list[int]]:
        """By value: the values that are made of it, and reach the loss."""
        found: dict[int, list[int]] = {n: [] for n in range(len(self.values))}
        for n in sorted(self.needed):
            for i in set(self.values[n].inputs):
                found[i].append(n)
        return found

    def above(self, numbers: Iterable[int]) -> set[int]:
        """These values and all that they are made of."""
        stack = list(numbers)
        seen = set(stack)
        while stack:
            for n in self.values[stack.pop()].inputs:
                if n not in seen:
                    seen.add(n)
                    stack.append(n)
        return seen

    def below(self, number: int, most: int) -> list[int]:
        """The next values that are made of one, in order."""
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
        if number not in self._labels:
            inputs = [n for m in self.meetings for n in self.values[m].inputs if self.is_pure(n)]
            asked, size = [number], self.values[number].size
            for n in dict.fromkeys(inputs):  # others will be wanted soon
                size += self.values[n].size
                if n not in self._labels and n != number and size < LIMIT:
                    asked.append(n)
            _, found = self.program.ask("tape label", targets=asked, names=self.names)
            for n in asked:
                x = found[str(n)].reshape(-1).astype(np.int64)
                once = x.size == self.values[n].size and np.unique(x).size == x.size
                self._labels[n] = x.reshape(self.values[n].shape) if once else None
        return self._labels[number]

    def frontiers(self, number: int) -> tuple[int, ...]:
        """The last values above an operation that hold elements of parameters as they are."""
        if number not in self._frontiers:
            found: list[int] = []
            stack = [n for n in self.values[number].inputs if self.is_pure(n)][::-1]
            while stack:
                n = stack.pop()
                if self.labels(n) is not None:
                    found.append(n)
                else:
                    stack += [i for i in self.values[n].inputs if self.is_pure(i)][::-1]
            self._frontiers[number] = tuple(dict.fromkeys(found))
        return self._frontiers[number]

    def names_of(self, number: int) -> list[str]:
        """The parameters that a value is made of."""
        return [self.values[n].name for n in self.above([number]) if self.values[n].name]

    def start(self, weights: Arrays) -> None:
        self.program.ask("tape start", prefixed("weights", weights))

    def play(self, given: dict[int, np.ndarray], targets: list[int]) -> np.ndarray:
        """Puts values in and keeps what follows; returns the targets' fingerprints."""
        arrays = {f"given/{n}": x for n, x in given.items()}
        _, found = self.program.ask("tape play", arrays, targets=targets)
        return found["fingerprints"].reshape(-1, COLUMNS)

    def attempt(self, trials: list[dict[int, np.ndarray]], targets: list[int]) -> np.ndarray:
        """Returns the targets' fingerprints for each trial: (trials, targets, columns)."""
        found = self._attempt(trials, targets, False)
        rows = [found[str(k)] for k in range(len(trials))]
        return np.array(rows).reshape(len(trials), len(targets), COLUMNS)

    def value_of(self, given: dict[int, np.ndarray], number: int) -> np.ndarray:
        return self._attempt([given], [number], True)[f"0/{number}"]

    def _attempt(
        self, trials: list[dict[int, np.ndarray]], targets: list[int], values: bool
    ) -> Arrays:
        arrays = {f"given/{k}/{n}": x for k, each in enumerate(trials) for n, x in each.items()}
        return self.program.ask(
            "tape attempt", arrays, targets=targets, trials=len(trials), values=values
        )[1]


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
        """The values that have the same elements, in any order."""
        if np.isnan(row).any() or int(row[0]) not in self.tables:
            return []
        like = are_alike(self.tables[int(row[0])], row, self.tolerance)
        return [n for n, same in zip(self.by_size[int(row[0])], like) if same]


def are_alike(rows: np.ndarray, row: np.ndarray, tolerance: float = EQUAL) -> np.ndarray:
    """Says if fingerprints are those of the same elements, in any order."""
    scale = np.maximum(rows[:, 3], row[3])
    largest = np.maximum(np.abs(rows[:, 5:7]).max(1), np.abs(row[5:7]).max())
    square = np.maximum(rows[:, 4], row[4])
    gaps = np.abs(rows - row)
    same = (gaps[:, :2] == 0).all(1)
    same &= (gaps[:, 2] <= tolerance * scale) & (gaps[:, 3] <= tolerance * scale)
    same &= gaps[:, 4] <= 2 * tolerance * square
    return same & (gaps[:, 5:7] <= tolerance * largest[:, None]).all(1)
