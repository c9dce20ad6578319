"""Which elements of the reference's tensors stand in a value of the port: what is tried at one
operation, and which of it gives the reference's result."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, permutations, zip_longest
from math import prod

import numpy as np

from lockstep.check import names
from lockstep.check.following.selections import Selection, read_apart
from lockstep.check.following.tapes import (
    Known,
    LiveTape,
    RecordedTape,
    SideTape,
    are_alike,
    row_of,
)
from lockstep.check.following.turns import cuts, digest, joins, turns
from lockstep_recorder.operations import SEES_ORDER, fingerprint, ordered

TRIALS, TOGETHER = 200, 2000  # candidates of one operation, of one tensor and of several
LAYOUTS = 24  # of one part of a tensor
JOINED = 24  # ways to put the same tensors together that fit
LARGE = 1_000_000  # elements of all candidates that are tried at once


@dataclass(frozen=True)
class Candidate:
    """Elements of the reference, for values of the port that hold tensors without a partner."""

    met: tuple[int, ...]  # the reference's operations whose tensors they are
    places: dict[int, np.ndarray]  # by the port's value: the reference's elements
    kind: str = "whole"  # part: of the reference's tensor; join: of several; permuted

    @property
    def size(self) -> int:
        return sum(x.size for x in self.places.values())


class Fits:
    """Candidates for the tensors that an operation of the port meets.

    Args:
        known: the reference's values.
        flat: the elements of all of its tensors.
    """

    def __init__(
        self, reference: RecordedTape, port: LiveTape, known: Known, flat: np.ndarray
    ) -> None:
        self.reference, self.port, self.known, self.flat = reference, port, known, flat
        self.apart: dict[tuple[int, int, int], list[np.ndarray]] = {}  # answers of `_read_apart`

    def candidates(
        self, meeting: int, unknown: list[int], orders: Iterable[np.ndarray] = (),
        kinds: tuple[str, ...] = ("whole", "part"),
    ) -> Iterator[Candidate]:  # fmt: skip
        """Yields what one operation of the reference has for the values that hold tensors."""
        if len(unknown) > 1:
            yield from self._together(meeting, unknown) if "whole" in kinds else ()
            return
        (frontier,) = unknown
        size = self.port.values[frontier].size
        for theirs in self.reference.frontiers(meeting) if orders else ():
            for order in orders:
                x = self.held(theirs)
                for axis in (k for k, length in enumerate(x.shape) if length == order.size):
                    for y in self._fit(x.take(order, axis), frontier):
                        yield Candidate((meeting,), {frontier: y}, "permuted")
        for theirs in () if orders else self.reference.frontiers(meeting):
            seen: set[bytes] = set()
            for kind in kinds:
                for x in _forms(self.reference, theirs):
                    parts = [x] if kind == "whole" else self._parts(meeting, x, size)
                    for y in _in_turn([self._fit(part, frontier) for part in parts]):
                        if (key := digest(y)) not in seen:
                            seen.add(key)
                            yield Candidate((meeting,), {frontier: y}, kind)

    def _together(self, meeting: int, unknown: list[int]) -> Iterator[Candidate]:
        """Yields one operation's tensors for several values, each once, those of like names first;
        values of the same elements, such as of a tensor that is used twice, have one tensor."""
        groups: dict[bytes, list[int]] = {}
        for f in unknown:
            groups.setdefault(elements_of(present(self.port.labels(f))), []).append(f)
        each: dict[bytes, tuple[int, np.ndarray]] = {}
        for f in self.reference.frontiers(meeting):
            own = _forms(self.reference, f)[-1]  # as in its tensor, if it is all of that
            each.setdefault(elements_of(own), (f, own))
        fitting = [self._alike_first(first, list(each.values())) for first, *_ in groups.values()]
        for chosen in _each_once(fitting):
            places: dict[int, np.ndarray] = {}
            for (first, *others), x in zip(groups.values(), chosen):
                places[first] = x
                places |= {f: self._as_in(first, x, f) for f in others}
            yield Candidate((meeting,), places)

    def _alike_first(
        self, frontier: int, held: list[tuple[int, np.ndarray]]
    ) -> list[tuple[int, np.ndarray]]:
        """Lists the values of the reference that fit one of the port's, in each layout, by what
        their names have in common with its own; the next in its order first."""
        found: list[tuple[float, int, int, np.ndarray]] = []
        (ours, *_) = self.port.names_of(frontier)
        for theirs, x in held:
            share = max(names.share_of_words(ours, n) for n in self.reference.names_of(theirs))
            for k, y in enumerate(islice(turns(x, self.shape(frontier)), LAYOUTS)):
                found.append((-share, theirs, k, y))
        return [(theirs, y) for *_, theirs, _, y in sorted(found, key=lambda each: each[:3])]

    def _as_in(self, one: int, places: np.ndarray, other: int) -> np.ndarray:
        """Returns the reference's elements in one value, as they stand in another of the same."""
        ours, theirs = (present(self.port.labels(f)) for f in (one, other))
        order = np.argsort(ours, axis=None)
        return places.ravel()[order][np.searchsorted(np.sort(ours, axis=None), theirs)]

    def _parts(self, meeting: int, x: np.ndarray, size: int) -> list[np.ndarray]:
        """Lists the parts of a tensor whose results the reference reads apart, such as each second
        column; where it reads none, its slices."""
        found = []
        for axis, length in enumerate(x.shape):
            part, rest = divmod(length * size, x.size)
            if not rest and 0 < part < length:
                found += [x.take(at, axis) for at in self._read_apart(meeting, length, part)]
        return found or list(islice(cuts(x, size), 64))

    def _read_apart(self, meeting: int, length: int, part: int) -> list[np.ndarray]:
        key = meeting, length, part
        if key not in self.apart:
            self.apart[key] = read_apart(self.reference, self.known, *key)
        return self.apart[key]

    def _rows_of_parts(self, meeting: int, size: int) -> np.ndarray:
        """Returns the fingerprints of the parts of an operation's result that have a size."""
        rows = [self.reference.pieces(meeting, size)]
        whole = self.reference.values[meeting].size
        for along in self.reference.marginals_of(meeting):
            part, rest = divmod(len(along) * size, max(whole, 1))
            if not rest and 0 < part < len(along):
                rows += [row_of(along[at], size)[None]
                         for at in self._read_apart(meeting, len(along), part)]  # fmt: skip
        return np.concatenate(rows)

    def _fit(self, x: np.ndarray, frontier: int) -> Iterator[np.ndarray]:
        """Yields the layouts of the reference's elements in one of the port's values: turned into
        its shape, or into that of the tensor whose elements it holds."""
        seen: set[bytes] = set()
        labels = present(self.port.labels(frontier))
        for form in _forms(self.port, frontier):
            for y in turns(x, form.shape):
                made = y
                if form is not labels:
                    made = y.reshape(-1)[labels - form.min()]
                if (key := digest(made)) not in seen:
                    seen.add(key)
                    yield made

    def held(self, frontier: int) -> np.ndarray:
        """Returns the elements that a value of the reference holds."""
        return present(self.reference.labels(frontier))

    def shape(self, number: int) -> tuple[int, ...]:
        """Returns the shape of a value of the port, of its real numbers."""
        return self.port.values[number].held

    def _shape_of(self, number: int) -> tuple[int, ...]:
        return self.reference.values[number].held

    def trial(self, candidate: Candidate) -> dict[int, np.ndarray]:
        """Returns the data that a candidate puts in the place of values."""
        return {f: self.flat[places] for f, places in candidate.places.items()}

    def matching(
        self, number: int, meetings: list[int], unknown: list[int],
        also: dict[int, np.ndarray] | None = None, orders: Iterable[np.ndarray] = (),
        kinds: tuple[str, ...] = ("whole", "part"),
    ) -> list[Candidate]:  # fmt: skip
        """Returns the candidates of these operations with which the result is theirs.

        Args:
            also: values that are put in besides.
            orders: of the indices of an axis, to be tried instead of turns alone.
        """
        found: list[Candidate] = []
        for meeting in meetings:
            candidates = iter([Candidate((meeting,), {})])
            if unknown:
                candidates = self.candidates(meeting, unknown, orders, kinds)
                candidates = islice(candidates, self._most(unknown))
            pieces = None
            agreeing: list[tuple[Candidate, dict[int, np.ndarray]]] = []
            for candidate, trial, row in self._tried(number, candidates, also or {}):
                if candidate.kind == "part":
                    if pieces is None:
                        pieces = self._rows_of_parts(meeting, int(row[0]))
                    agrees = self._is_among(pieces, row)
                else:
                    agrees = self.comes_of(self.known.find(row), meeting)
                if agrees:
                    agreeing.append((candidate, trial))
                    if candidate.size > LARGE:
                        break
            found += self._exactly(number, meeting, agreeing)
        return found

    def _most(self, unknown: list[int]) -> int:
        """Returns how many candidates are tried: more of several small tensors."""
        size = sum(self.port.values[f].size for f in unknown)
        few = len(unknown) == 1 or not size
        return TRIALS if few else max(TRIALS, min(TOGETHER, 10 * LARGE // size))

    def _tried(
        self, number: int, candidates: Iterator[Candidate], also: dict[int, np.ndarray]
    ) -> Iterator[tuple[Candidate, dict[int, np.ndarray], np.ndarray]]:
        """Yields candidates with what is put in for them and the fingerprint that results; as many
        are asked for at once as are not large."""
        while some := list(islice(candidates, 1)):
            some += islice(candidates, LARGE // max(some[0].size, 1))
            trials = [self.trial(candidate) | also for candidate in some]
            yield from zip(some, trials, self.port.attempt(trials, [number])[:, 0])

    def _exactly(
        self, number: int, meeting: int, agreeing: list[tuple[Candidate, dict[int, np.ndarray]]]
    ) -> list[Candidate]:
        """Selects the layouts whose result is the reference's element by element."""
        whole = [pair for pair in agreeing if pair[0].kind == "whole"]
        rest = [candidate for candidate, _ in agreeing if candidate.kind != "whole"]
        if len(whole) < 2:
            return [candidate for candidate, _ in whole] + rest
        exact = [candidate for candidate, trial in whole[:40]
                 if self._in_order([self.port.value_of(trial, number)], meeting)]  # fmt: skip
        return (exact or [candidate for candidate, _ in whole]) + rest

    def _is_among(self, rows: np.ndarray, row: np.ndarray) -> bool:
        return len(rows) > 0 and bool(are_alike(rows, row, self.known.tolerance).any())

    def comes_of(self, numbers: list[int], meeting: int) -> bool:
        """Says if one of the reference's values is made at an operation, or of what is."""
        near = [n for n in numbers if n >= meeting][:4]
        return any(meeting in self.reference.above([n]) for n in near)

    def joined(self, group: tuple[int, ...], frontier: int) -> Iterator[Candidate]:
        """Yields the tensors of several operations, put together in each order."""
        shape = self.shape(frontier)
        parts = [self.held(f) for m in group for f in self.reference.frontiers(m)[:1]]
        if sum(part.size for part in parts) != prod(shape):
            return
        seen: set[bytes] = set()
        for arrays in (parts, [part.T for part in parts]):
            for whole in joins(arrays):
                for y in turns(whole, shape):
                    if (key := digest(y)) not in seen:
                        seen.add(key)
                        yield Candidate(group, {frontier: y}, "join")
        if shape[0] == len(parts):
            for each in zip(*(list(islice(turns(p, shape[1:]), 60)) for p in parts)):
                for order in permutations(each):
                    yield Candidate(group, {frontier: np.stack(order)}, "join")

    def matching_parts(
        self, number: int, group: tuple[int, ...], frontier: int, parts: tuple[Selection, ...]
    ) -> list[Candidate]:
        """Returns the tensors of several operations, put where the port reads its result apart.

        Args:
            group: the operations.
            parts: of the result, as many.
        """
        shape = self.shape(frontier)
        length = self.shape(number)[parts[0].axis]
        found: list[Candidate] = []
        for axis in (k for k, n in enumerate(shape) if n == length):
            fitting = [[self._fit_part(number, m, frontier, axis, part) for part in parts]
                       for m in group]  # fmt: skip
            for order in permutations(range(len(group))):
                chosen = [fitting[m][k] for k, m in enumerate(order)]
                made = [x for x in chosen if x is not None]
                if len(made) == len(parts):
                    places = np.zeros(shape, np.int64)
                    for part, x in zip(parts, made):
                        np.moveaxis(places, axis, 0)[part.indices] = np.moveaxis(x, axis, 0)
                    found.append(Candidate(group, {frontier: places}, "join"))
        return found

    def _fit_part(
        self, number: int, meeting: int, frontier: int, axis: int, part: Selection
    ) -> np.ndarray | None:
        """Returns the layout of an operation's tensor in a part of the port's with which the part
        of the result is the operation's."""
        wanted, held = self.known.rows[meeting], self.held(self.reference.frontiers(meeting)[0])
        shape = list(self.shape(frontier))
        shape[axis] = len(part.indices)
        layouts = list(islice(turns(held, tuple(shape)), LAYOUTS))
        whole = self.port.values[number]
        if len(part.indices) * whole.size != wanted[0] * whole.shape[part.axis] or not layouts:
            return None
        trials = []
        for x in layouts:
            data = np.zeros(self.shape(frontier))
            np.moveaxis(data, axis, 0)[part.indices] = np.moveaxis(self.flat[x], axis, 0)
            trials.append({frontier: data})
        results = self.port.values_of(trials, [number])[number]
        rows = np.array([fingerprint(y.take(part.indices, part.axis)) for y in results])
        alike = are_alike(rows, wanted, self.known.tolerance)
        return layouts[int(alike.argmax())] if alike.any() else None

    def matching_joined(
        self,
        number: int,
        candidates: Iterable[Candidate],
        also: dict[int, np.ndarray] | None = None,
    ) -> list[Candidate]:
        """Returns the joined candidates of whose result a part is each operation's; if there are
        any, those alone of which it is element by element."""
        found, exact = [], []
        for candidate in islice(candidates, 2 * TRIALS):
            value = self.port.value_of(self.trial(candidate) | (also or {}), number)
            if sum(int(self.known.rows[m][0]) for m in candidate.met) != value.size:
                break
            alike = [self._alike_pieces(value, m) for m in candidate.met]
            if all(alike):
                found.append(candidate)
                exact += [candidate] if all(map(self._in_order, alike, candidate.met)) else []
                if len(exact or found) == JOINED:
                    break
        return exact or found

    def _alike_pieces(self, value: np.ndarray, meeting: int) -> list[np.ndarray]:
        """Lists the slices of a value that are an operation's result, in any order."""
        row = self.known.rows[meeting]
        return [piece for piece in islice(cuts(value, int(row[0])), 64)
                if are_alike(fingerprint(piece)[None], row, self.known.tolerance)[0]]  # fmt: skip

    def _in_order(self, pieces: list[np.ndarray], meeting: int) -> bool:
        """Says if one of these is an operation's result element by element, if its axes turn."""
        shape, row = self._shape_of(meeting), self.known.rows[meeting]
        scale = self.known.tolerance * row[3]
        return any(np.allclose(ordered(y), row[SEES_ORDER], rtol=0, atol=scale)
                   for piece in pieces for y in turns(piece, shape))  # fmt: skip


def _each_once(fitting: list[list[tuple[int, np.ndarray]]]) -> Iterator[list[np.ndarray]]:
    """Yields a layout for each of several values, none of the same tensor as another's.

    Args:
        fitting: for each value: a tensor's number and its elements in a layout.
    """
    if not fitting:
        yield []
        return
    first, *others = fitting
    for number, x in first:
        left = [[each for each in layouts if each[0] != number] for layouts in others]
        tensors = {each[0] for layouts in left for each in layouts}
        if all(left) and len(tensors) >= len(left):  # else no choice has one for each
            yield from ([x, *rest] for rest in _each_once(left))


def _in_turn(layouts: list[Iterator[np.ndarray]]) -> Iterator[np.ndarray]:
    """Yields the first layout of each part, then the second of each."""
    for each in zip_longest(*layouts):
        yield from (y for y in each if y is not None)


def _forms(side: SideTape, frontier: int) -> list[np.ndarray]:
    """Lists the elements that a value holds: as they stand in it, and as in their tensor."""
    labels = present(side.labels(frontier))
    for name in side.names_of(frontier):
        number = side.numbers[name]
        start, shape = int(side.starts[side.names.index(name)]), side.values[number].shape
        if labels.size == prod(shape) and labels.min() == start and labels.shape != shape:
            return [labels, np.arange(start, start + labels.size).reshape(shape)]
    return [labels]


def elements_of(places: np.ndarray) -> bytes:
    """Tells sets of elements apart."""
    return digest(np.sort(places, axis=None))


def present(labels: np.ndarray | None) -> np.ndarray:
    assert labels is not None
    return labels
