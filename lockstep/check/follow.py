"""Pairs the tensors of two programs by the values that they meet, and finds where values part.

The port's tape is walked beside the reference's. Where an operation meets a tensor that has no
partner, the reference's operations on the same data are looked up: their tensor, in the layout with
which the result is the same, is the partner. No name is looked at.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations, islice, permutations, product
from math import prod

import numpy as np

from lockstep.check import names
from lockstep.check.tapes import (
    EQUAL,
    Known,
    LiveTape,
    RecordedTape,
    SideTape,
    are_alike,
    axes_of,
    order_between,
)
from lockstep.check.turns import cuts, digest, joins, turns
from lockstep.model.params import Arrays
from lockstep_recorder.operations import COLUMNS, SEES_ORDER, fingerprint, marginals, ordered

AHEAD = 24  # values after an operation in which a guess must be confirmed
NEAR = 8  # of the reference's operations that are tried where none has the same data
GUESSES = 24  # layouts of one tensor that are tried ahead
TRIALS = 200  # candidates of one operation
RETURNS = 30  # to an earlier choice, in one walk
ROUNDED = 3e-6  # relative: values in which something was rounded to float32
LARGE = 1_000_000  # elements of all candidates that are tried at once
OPEN = -1  # an element of the port that has no partner


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


@dataclass
class Followed:
    """Pairs, layouts and the first difference that following the data finds.

    Attributes:
        source: by the port's tensor: for each element the reference's, counted through its tensors
            in order, or OPEN.
        open: the port's tensors that reach the loss and have no partner for some element.
        parts: where the values part, in the order of the program.
        equal: whether the losses are.
    """

    source: dict[str, np.ndarray]
    starts: dict[str, int]  # of the reference's tensors
    shapes: dict[str, tuple[int, ...]]  # of the reference's tensors
    open: list[str]
    unused: list[str]  # the port's tensors that do not reach the loss
    parts: list[PartedAt]
    equal: bool
    guessed: list[int] = field(default_factory=list)  # values confirmed by a later value
    permuted: frozenset[str] = frozenset()  # the port's tensors whose order is that of their data
    met: dict[int, list[int]] = field(default_factory=dict)  # the port's value -> the reference's

    def partners(self, name: str) -> list[str]:
        """The reference's tensors of which a tensor of the port is made, in its own order."""
        places = self.source[name].reshape(-1)
        names, starts = list(self.starts), np.array(list(self.starts.values()))
        owners = np.searchsorted(starts, places[places != OPEN], "right") - 1
        return [names[owner] for owner in dict.fromkeys(owners.tolist())]


@dataclass(frozen=True)
class Candidate:
    """Elements of the reference, for values of the port that hold tensors without a partner."""

    met: tuple[int, ...]  # the reference's operations whose tensors they are
    places: dict[int, np.ndarray]  # by the port's value: the reference's elements
    kind: str = "whole"  # part: of the reference's tensor; join: of several; permuted

    @property
    def size(self) -> int:
        return sum(x.size for x in self.places.values())


def follow(reference: RecordedTape, port: LiveTape, weights: Arrays) -> Followed:
    """Walks the port's tape with the reference's weights.

    Args:
        reference: its tape was recorded with these weights.
        port: its tape was made with its own weights and the same batch.
        weights: the reference's.
    """
    found: list[Followed] = []
    for tolerance in (EQUAL, ROUNDED):  # such as of a table that one side made in float32
        walk = _Walk(reference, port, weights, tolerance)
        walk.go()
        found.append(walk.result())
        if not found[-1].open:
            break
    best = min(found, key=lambda each: len(each.open))
    return replace(best, parts=found[0].parts, equal=found[0].equal)


@dataclass
class Progress:
    """How far a walk has come; it is taken back to an earlier one where a choice was wrong."""

    source: np.ndarray  # by the port's element: the reference's
    used: np.ndarray  # by the reference's element: whether a tensor of the port has it
    have: set[int]  # the port's values that were played
    given: dict[int, np.ndarray]  # the port's pure values that were put in: the reference's places
    replaced: dict[int, int]  # the port's value -> the reference's, which was put in
    data: dict[int, np.ndarray] = field(default_factory=dict)  # what was put in
    rows: dict[int, np.ndarray] = field(default_factory=dict)  # the port's fingerprints
    alike: dict[int, list[int]] = field(default_factory=dict)  # its value -> the reference's
    met: dict[int, list[int]] = field(default_factory=dict)  # the same, of what was not replaced
    done: set[int] = field(default_factory=set)  # the reference's operations that have partners
    guessed: list[int] = field(default_factory=list)

    def copy(self) -> "Progress":
        return Progress(self.source.copy(), self.used.copy(), set(self.have), dict(self.given),
                     dict(self.replaced), dict(self.data), dict(self.rows), dict(self.alike),
                     dict(self.met), set(self.done), list(self.guessed))  # fmt: skip


@dataclass
class Fork:
    """An operation at which several tensors of the reference fit."""

    at: int  # in the order of the walk
    number: int
    state: Progress
    left: list[Candidate]
    meetings: set[int]  # the reference's operations of all that fit


class _Walk:
    def __init__(
        self, reference: RecordedTape, port: LiveTape, weights: Arrays, tolerance: float
    ) -> None:
        self.reference, self.port = reference, port
        self.flat = np.concatenate([np.ravel(weights[n]) for n in reference.names] or [np.zeros(0)])
        self.known = Known(reference.data, reference.rows, tolerance)
        self.users: dict[int, list[int]] = {}
        for m in reference.meetings:
            for n in reference.data_inputs(m):
                self.users.setdefault(n, []).append(m)
        port.start()
        begun = {n for n, v in enumerate(port.values) if v.op == "batch"}
        self.now = Progress(np.full(port.starts[-1], OPEN), np.zeros(self.flat.size, bool), begun,
                         {}, {})  # fmt: skip
        self.order: list[tuple[list[int], int]] = [([], -1)]  # (values, the meeting after them)
        for n in port.data:
            if n not in begun:
                if port.frontiers(n):
                    self.order[-1] = (self.order[-1][0], n)
                    self.order.append(([], -1))
                else:
                    self.order[-1][0].append(n)
        sides = (names.layer_indexes(side.names) for side in (port, reference))
        self.indexes = names.align_indexes(*sides)  # of the port's tensors, of the reference's
        self.choices: list[Fork] = []
        self.permuted: set[str] = set()
        self.returns = RETURNS

    def go(self) -> None:
        roots = [n for n in self.port.data if n in self.now.have]
        self._note(roots, self.port.play({}, roots))
        at, best = 0, (-1, 0, self.now)
        while at < len(self.order):
            values, number = self.order[at]
            self._play(values)
            if number < 0 or self._meet(at, number):
                agrees = number >= 0 or bool(self.now.met.get(self.port.loss))
            else:
                agrees = False
            if not agrees and self.choices:
                agreeing = sum(map(bool, self.now.met.values()))
                if (at, agreeing) > best[:2]:
                    best = at, agreeing, self.now.copy()
                returned = self._return()
                if returned is not None:
                    at = returned + 1
                    continue
                self._restore(best[2])
                at = best[0]
                number = self.order[at][1]
            if not agrees and number >= 0:
                self._part(number)
            if agrees and at >= best[0] >= 0:  # what failed before does so no more
                self.choices = [choice for choice in self.choices if choice.at >= at]
                self.returns = RETURNS
            best = best if self.choices and at < best[0] else (-1, 0, self.now)
            at += 1

    def _return(self) -> int | None:
        """Takes the next candidate of the last choice that has one; returns its place."""
        while self.choices and self.returns > 0:
            choice = self.choices[-1]
            if not choice.left:
                self.choices.pop()
                continue
            self.returns -= 1
            self._restore(choice.state.copy())
            candidate = choice.left.pop(0)
            self._take(candidate)
            self._play([choice.number])
            self._settle(choice.number, candidate)
            return choice.at
        self.choices = []
        return None

    def _restore(self, state: Progress) -> None:
        former, self.now = self.now, state
        put = {f: self.flat[x] for f, x in state.given.items() if former.given.get(f) is not x}
        put |= {n: x for n, x in state.data.items() if former.data.get(n) is not x}
        free = former.data.keys() - state.data.keys()
        if put or free:
            self.port.play(put, [], free)

    def _confirm(self, number: int) -> None:
        """Forgets the choices that a value shows to be right: it is made of all that fitted."""
        for n in self.now.met.get(number, [])[:1] if self.choices else ():
            above = self.reference.above([n])
            ours = self.port.above([number])
            self.choices = [c for c in self.choices if not (
                c.number in ours and len(c.meetings & above) == len(c.meetings) > 1)]  # fmt: skip

    def _play(self, numbers: list[int]) -> None:
        found: list[int] = []
        for n in numbers:
            if n not in self.now.have and self._inputs_are_there(n, found):
                found.append(n)
        if found:
            self._note(found, self.port.play({}, found))
            self._confirm(found[-1])

    def _inputs_are_there(self, number: int, besides: Iterable[int] = ()) -> bool:
        there = self.now.have.union(besides)
        return all(n in there for n in self.port.data_inputs(number))

    def _note(self, numbers: list[int], rows: np.ndarray) -> None:
        now = self.now
        now.have |= set(numbers)
        given = {r for n in now.replaced for r in now.alike[n]}
        for n, row in zip(numbers, rows):
            now.rows[n] = row
            now.alike[n] = self.known.find(row)
            now.met[n] = [] if given & set(now.alike[n]) else now.alike[n]
            if not now.alike[n]:  # such as a part of a value, in another shape
                for d in self.port.data_inputs(n):
                    if (
                        now.alike.get(d)
                        and d in now.rows
                        and (are_alike(now.rows[d][None], row, self.known.tolerance)[0])
                    ):
                        now.alike[n] = now.met[n] = now.alike[d]

    def _meet(self, at: int, number: int) -> bool:
        """Pairs the tensors that an operation meets, and plays it; False where values part."""
        frontiers = self.port.frontiers(number)
        unknown = [f for f in frontiers if self._is_open(f)]
        self._give([f for f in frontiers if f not in unknown])
        if not self._inputs_are_there(number):
            return False
        if not unknown:
            agrees = self._agrees_ahead(number)
            self._play([number])
            return agrees
        found = self._decide(number, unknown)
        if found and len(found) > 1 and self._shows_nothing(number, found[0]):
            return True
        if found:
            if len(found) > 1:
                meetings = {m for c in found for m in c.met}
                self.choices.append(Fork(at, number, self.now.copy(), found[1:6], meetings))
            self._take(self._telling(number, found[0]))
        elif not self._guess(number, unknown):
            return False
        self._play([number])
        if found:
            self._settle(number, found[0])
        return True

    def _shows_nothing(self, number: int, candidate: Candidate) -> bool:
        """Plays an operation whose result is one number throughout, such as the product of a first
        state of zeros: its tensor stays open until it is met again."""
        trial = self._trial(candidate)
        if not _is_blank(self.port.attempt([trial], [number])[0, 0]):
            return False
        self.port.play(trial, [])
        self._play([number])
        return True

    def _telling(self, number: int, candidate: Candidate) -> Candidate:
        """Leaves out, of several values, those that do not change the result: they stay open."""
        if len(candidate.places) < 2:
            return candidate
        trial = self._trial(candidate)
        trials = [trial, *(trial | {f: 0 * x + 1} for f, x in trial.items())]
        first, *others = self.port.attempt(trials, [number])[:, 0]
        silent = {f for f, row in zip(trial, others) if np.array_equal(row, first)}
        self.port.play({f: trial[f] for f in silent}, [])  # something must stand there
        places = {f: x for f, x in candidate.places.items() if f not in silent}
        return replace(candidate, places=places)

    def _settle(self, number: int, candidate: Candidate) -> None:
        """A part of the reference's value, or several joined, is like what it is a part of."""
        if number in self.now.have and not self.now.alike[number]:
            alike = [n for m in candidate.met for n in self.known.find(self.known.rows[m])]
            self.now.alike[number] = alike
            self.now.met[number] = [] if number in self.now.replaced else alike

    def _part(self, number: int) -> None:
        """Goes on behind a difference."""
        frontiers = self.port.frontiers(number)
        unknown = [f for f in frontiers if self._is_open(f)]
        self._give([f for f in frontiers if f not in unknown])
        replaced = self._replace(number, unknown)
        if replaced:
            self.now.have.discard(number)
        if not any(self._is_open(f) for f in frontiers):
            self._play([number])
            if replaced:
                self._settle(number, replaced)

    def _give(self, frontiers: list[int]) -> None:
        fresh = {f: self._source_of(f) for f in frontiers if f not in self.now.given}
        if fresh:
            self.port.play({f: self.flat[places] for f, places in fresh.items()}, [])
            self.now.given |= fresh

    def _is_open(self, frontier: int) -> bool:
        return bool((self._source_of(frontier) == OPEN).any())

    def _source_of(self, frontier: int) -> np.ndarray:
        return self.now.source[_present(self.port.labels(frontier))]

    def _take(self, candidate: Candidate) -> None:
        """Makes a candidate the partner."""
        now = self.now
        for frontier, places in candidate.places.items():
            now.source[_present(self.port.labels(frontier))] = places
            now.used[places] = True
            now.given[frontier] = places
        if candidate.kind == "permuted":
            self.permuted |= {name for f in candidate.places for name in self.port.names_of(f)}
        if candidate.places:
            self.port.play(self._trial(candidate), [])
        now.done |= set(candidate.met)

    # The reference's operations that had the same data.

    def _decide(self, number: int, unknown: list[int]) -> list[Candidate]:
        """Returns the candidates with which the result is the reference's, the likeliest first."""
        same = [m for d in self.port.data_inputs(number) for n in self.now.alike.get(d, [])
                for m in self.users.get(n, [])]  # fmt: skip
        same = list(dict.fromkeys(same))
        fresh = [m for m in same if m not in self.now.done or self._is_left(m)]
        found = self._matching(number, fresh, unknown)
        if not found and len(unknown) == 1:
            for count in (2, 3, 4):
                for group in islice(combinations(fresh, count), 30):
                    found += self._matching_joined(number, self._joined(group, unknown[0]))
                if found:
                    break
        if not found and len(unknown) == 1 and (orders := self._orders(number)):
            found = self._matching(number, fresh, unknown, orders=orders)
        found = found or self._matching(number, [m for m in same if m not in fresh], unknown)
        words = _words(self.port.names_of(f) for f in unknown)

        def rank(candidate: Candidate) -> tuple[bool, float]:
            taken = any(self.now.used[places].any() for places in candidate.places.values())
            theirs = _words(self.reference.names_of(f) for m in candidate.met
                            for f in self.reference.frontiers(m))  # fmt: skip
            return taken, -len(words & theirs) / max(len(words | theirs), 1)

        ranks = [rank(candidate) for candidate in found]
        least = min((taken for taken, _ in ranks), default=False)
        kept = [(r, at) for at, r in enumerate(ranks) if r[0] == least]
        return [found[at] for _, at in sorted(kept)]

    def _orders(self, number: int) -> list[np.ndarray]:
        """Finds in which order the indices of an operation's data stand, where they are those of
        the reference's, such as columns of what is joined the other way round."""
        found: dict[bytes, np.ndarray] = {}
        for d in self.port.data_inputs(number):
            others = [n for n in self.now.alike.get(d, []) if self.reference.marginals_of(n)]
            ours = axes_of(marginals(self.port.value_of({}, d)), self._shape(d)) if others else []
            for n in others:
                for a in ours:
                    for b in self.reference.marginals_of(n):
                        order = order_between(a, b, self.known.tolerance)
                        if order is not None:
                            found.setdefault(order.tobytes(), order)
        return list(found.values())

    def _is_left(self, meeting: int) -> bool:
        """Says if a part of an operation's tensor has no partner."""
        return any(not self.now.used[self._held(f)].all()
                   for f in self.reference.frontiers(meeting))  # fmt: skip

    def _candidates(
        self, meeting: int, unknown: list[int], orders: Iterable[np.ndarray] = (),
        kinds: tuple[str, ...] = ("whole", "part"),
    ) -> Iterator[Candidate]:  # fmt: skip
        held = [self._held(f) for f in self.reference.frontiers(meeting)]
        if len(unknown) > 1:
            for chosen in islice(permutations(held, len(unknown)), 24):
                fitted = [next(turns(x, self._shape(f)), None) for f, x in zip(unknown, chosen)]
                places = {f: x for f, x in zip(unknown, fitted) if x is not None}
                if len(places) == len(unknown):
                    yield Candidate((meeting,), places)
            return
        (frontier,) = unknown
        size = self.port.values[frontier].size
        for theirs in self.reference.frontiers(meeting) if orders else ():
            for order in orders:
                x = self._held(theirs)
                for axis in (k for k, length in enumerate(x.shape) if length == order.size):
                    for y in self._fit(x.take(order, axis), frontier):
                        yield Candidate((meeting,), {frontier: y}, "permuted")
        for theirs in () if orders else self.reference.frontiers(meeting):
            seen: set[bytes] = set()
            for kind in kinds:
                for x in _forms(self.reference, theirs):
                    parts = [x] if kind == "whole" else islice(cuts(x, size), 64)
                    for y in (y for part in parts for y in self._fit(part, frontier)):
                        if (key := digest(y)) not in seen:
                            seen.add(key)
                            yield Candidate((meeting,), {frontier: y}, kind)

    def _fit(self, x: np.ndarray, frontier: int) -> Iterator[np.ndarray]:
        """Yields the layouts of the reference's elements in one of the port's values: turned into
        its shape, or into that of the tensor whose elements it holds."""
        seen: set[bytes] = set()
        labels = _present(self.port.labels(frontier))
        for form in _forms(self.port, frontier):
            for y in turns(x, form.shape):
                made = y
                if form is not labels:
                    made = y.reshape(-1)[labels - form.min()]
                if (key := digest(made)) not in seen:
                    seen.add(key)
                    yield made

    def _held(self, frontier: int) -> np.ndarray:
        return _present(self.reference.labels(frontier))

    def _shape(self, number: int) -> tuple[int, ...]:
        return self.port.values[number].shape

    def _shape_of(self, number: int) -> tuple[int, ...]:
        return self.reference.values[number].shape

    def _trial(self, candidate: Candidate) -> dict[int, np.ndarray]:
        return {f: self.flat[places] for f, places in candidate.places.items()}

    def _matching(
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
                candidates = islice(self._candidates(meeting, unknown, orders, kinds), TRIALS)
            pieces = None
            agreeing: list[tuple[Candidate, dict[int, np.ndarray]]] = []
            for candidate, trial, row in self._tried(number, candidates, also or {}):
                if candidate.kind == "part":
                    if pieces is None:
                        pieces = self.reference.pieces(meeting, int(row[0]))
                    agrees = self._is_among(pieces, row)
                else:
                    agrees = self._comes_of(self.known.find(row), meeting)
                if agrees:
                    agreeing.append((candidate, trial))
                    if candidate.size > LARGE:
                        break
            found += self._exactly(number, meeting, agreeing)
        return found

    def _tried(
        self, number: int, candidates: Iterator[Candidate], also: dict[int, np.ndarray]
    ) -> Iterator[tuple[Candidate, dict[int, np.ndarray], np.ndarray]]:
        """Yields candidates with what is put in for them and the fingerprint that results; as many
        are asked for at once as are not large."""
        while some := list(islice(candidates, 1)):
            some += islice(candidates, LARGE // max(some[0].size, 1))
            trials = [self._trial(candidate) | also for candidate in some]
            yield from zip(some, trials, self.port.attempt(trials, [number])[:, 0])

    def _exactly(
        self, number: int, meeting: int, agreeing: list[tuple[Candidate, dict[int, np.ndarray]]]
    ) -> list[Candidate]:
        """Selects the layouts whose result is the reference's element by element."""
        whole = [pair for pair in agreeing if pair[0].kind == "whole"]
        rest = [candidate for candidate, _ in agreeing if candidate.kind != "whole"]
        if len(whole) < 2:
            return [candidate for candidate, _ in whole] + rest
        shape, row, exact = self._shape_of(meeting), self.known.rows[meeting], []
        for candidate, trial in whole[:40]:
            ours = self.port.value_of(trial, number)
            scale = self.known.tolerance * row[3]
            if any(np.allclose(ordered(y), row[SEES_ORDER], rtol=0, atol=scale)
                   for y in turns(ours, shape)):  # fmt: skip
                exact.append(candidate)
        return (exact or [candidate for candidate, _ in whole]) + rest

    def _pieces(self, value: np.ndarray, size: int) -> np.ndarray:
        found = [fingerprint(part) for part in islice(cuts(value, size), 64)]
        return np.array(found).reshape(-1, COLUMNS)

    def _is_among(self, rows: np.ndarray, row: np.ndarray) -> bool:
        return len(rows) > 0 and bool(are_alike(rows, row, self.known.tolerance).any())

    def _comes_of(self, numbers: list[int], meeting: int) -> bool:
        """Says if one of the reference's values is made at an operation, or of what is."""
        near = [n for n in numbers if n >= meeting][:4]
        return any(meeting in self.reference.above([n]) for n in near)

    def _joined(self, group: tuple[int, ...], frontier: int) -> Iterator[Candidate]:
        shape = self._shape(frontier)
        parts = [self._held(f) for m in group for f in self.reference.frontiers(m)[:1]]
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

    def _matching_joined(
        self,
        number: int,
        candidates: Iterable[Candidate],
        also: dict[int, np.ndarray] | None = None,
    ) -> list[Candidate]:
        found = []
        for candidate in islice(candidates, 2 * TRIALS):
            value = self.port.value_of(self._trial(candidate) | (also or {}), number)
            wanted = [self.known.rows[m] for m in candidate.met]
            if sum(int(row[0]) for row in wanted) != value.size:
                break
            pieces = {row[0]: self._pieces(value, int(row[0])) for row in wanted}
            if all(len(pieces[row[0]])
                   and are_alike(pieces[row[0]], row, self.known.tolerance).any()
                   for row in wanted):  # fmt: skip
                found.append(candidate)
                if len(found) == 6:
                    break
        return found

    # Where none had: another order of the same algebra, or a difference.

    def _ahead(self, number: int) -> list[int]:
        """The operation, and what is made of its result with what is known."""
        found = [number]
        for n in self.port.below(number, AHEAD):
            if self._inputs_are_there(n, found) and not any(
                f not in self.now.given for f in self.port.frontiers(n)
            ):
                found.append(n)
        return found

    def _agrees_ahead(self, number: int) -> bool:
        """Says if the result, or what is soon made of it, is a value of the reference."""
        for n in self.port.below(number, AHEAD):  # tensors that have partners, but were not met yet
            self._give([f for f in self.port.frontiers(n) if not self._is_open(f)])
        ahead = self._ahead(number)
        rows = self.port.attempt([{}], ahead)[0]
        return any(self.known.find(row) for row in rows if row[0] > 1)

    def _near(self) -> list[int]:
        """The reference's operations that are next in its order, of those without a partner."""
        return [m for m in self.reference.meetings if m not in self.now.done]

    def _guess(
        self, number: int, unknown: list[int], also: dict[int, np.ndarray] | None = None,
        tries: int = NEAR,
    ) -> bool:  # fmt: skip
        """Takes the next tensor that fits, or the next several joined, if a later value confirms
        it."""
        ahead = self._ahead(number)
        for candidates in islice(self._next_fitting(unknown), tries):
            rows = self.port.attempt([self._trial(c) | (also or {}) for c in candidates], ahead)
            for candidate, each in zip(candidates, rows):
                if any(not _is_blank(row) and self._comes_of_all(row, candidate) for row in each):
                    self._take(candidate)
                    self.now.guessed += unknown
                    return True
        return False

    def _next_fitting(self, unknown: list[int]) -> Iterator[list[Candidate]]:
        near = self._near()
        for meeting in near:
            all_ = self._candidates(meeting, unknown)
            if whole := list(islice((c for c in all_ if c.kind == "whole"), GUESSES)):
                yield whole
        for count in (2, 3, 4) if len(unknown) == 1 else ():
            for group in islice(combinations(near[:AHEAD], count), 100):
                if joined := list(islice(self._joined(group, unknown[0]), GUESSES)):
                    yield joined

    def _comes_of_all(self, row: np.ndarray, candidate: Candidate) -> bool:
        found = self.known.find(row)
        return all(self._comes_of(found, meeting) for meeting in candidate.met)

    def _replace(self, number: int, unknown: list[int]) -> Candidate | None:
        """Puts the reference's data in, if the result is then the reference's: values parted."""
        floats = [d for d in self.port.data_inputs(number)
                  if self.port.is_float(d) and self.port.values[d].size > 1]  # fmt: skip
        # A value that is right, but is met where it should not be, stays what it is.
        inputs = [d for d in floats if not self.now.alike.get(d)] or (floats if unknown else [])
        others = [d for d in self.port.data_inputs(number) if d not in inputs]
        if len(inputs) != 1 or not all(d in self.now.have for d in others):
            return None
        ours = inputs[0] if self.now.alike.get(inputs[0]) else self._unmoved(inputs[0])
        met = {n for found in self.now.met.values() for n in found}
        above = {n for i in self.port.above([ours]) for n in self.now.met.get(i, [])}
        meetings = self._near() if unknown else self._of_same_tensors(number)
        # First what the port has nowhere; then what it has changed once more.
        orders = (lambda d: d not in met, lambda d: d in above)
        for kind in ("whole", "joined", "part") if unknown else ("whole",):
            if kind == "joined":
                joined = self._replace_by_joined(number, unknown, ours)
                if joined:
                    return joined
                continue
            fits = [m for m in meetings
                    if not unknown or any(self._candidates(m, unknown, kinds=(kind,)))]  # fmt: skip
            for group in self._by_likeness(fits, unknown):
                for wanted, meeting in product(orders, group):
                    if found := self._replace_by(number, unknown, ours, meeting, wanted, (kind,)):
                        return found
        if unknown and self._replace_and_guess(number, unknown, ours, met):
            return Candidate((), {})
        return None

    def _by_likeness(self, meetings: list[int], unknown: list[int]) -> list[list[int]]:
        """Groups the next operations by what their tensors' names have in common with the port's,
        the likeliest first: with the reference's data in, the result of each is right."""
        ours = [name for f in unknown for name in self.port.names_of(f)]
        groups: dict[float, list[int]] = {}
        for m in meetings:
            theirs = [n for f in self.reference.frontiers(m) for n in self.reference.names_of(f)]
            groups.setdefault(self._likeness(ours, theirs), []).append(m)
        return [groups[score][:NEAR] for score in sorted(groups, reverse=True)]

    def _likeness(self, ours: list[str], theirs: list[str]) -> float:
        """Words in common over all words, and one more where the layers are the same."""
        a, b = _words([ours]), _words([theirs])
        layers = {self.indexes[0][n] for n in ours}, {self.indexes[1][n] for n in theirs}
        return len(a & b) / max(len(a | b), 1) + (layers[0] == layers[1])

    def _unmoved(self, number: int) -> int:
        """The first value above one that has the same elements in the same order, in a shape of its
        own: what else is made of it is then replaced, too."""
        rows = self.now.rows
        while len(inputs := self.port.data_inputs(number)) == 1 and all(
            n in rows and np.allclose(rows[n], rows[number], rtol=0, atol=EQUAL * rows[n][3])
            for n in (number, *inputs)
        ):
            (number,) = inputs
        return number

    def _replace_by(
        self, number: int, unknown: list[int], ours: int, meeting: int,
        wanted: Callable[[int], bool], kinds: tuple[str, ...],
    ) -> Candidate | None:  # fmt: skip
        """Puts one operation's data in, if the result is then the operation's."""
        size = self.port.values[ours].size
        theirs = [d for d in self.reference.data_inputs(meeting)
                  if self.reference.values[d].size == size and wanted(d)]  # fmt: skip
        if not theirs:
            return None
        value = self.reference.value_of(theirs[0])
        for data in () if value is None else islice(turns(value, self._shape(ours)), 12):
            found = self._matching(number, [meeting], unknown, {ours: data}, kinds=kinds)
            if found:
                return self._take_with(number, found[0], ours, theirs[0], data)
        return None

    def _take_with(
        self, number: int, candidate: Candidate, ours: int, theirs: int, data: np.ndarray
    ) -> Candidate:
        """Makes a candidate the partner, and goes on with the reference's data; where the port's is
        right elsewhere, with the result that the reference's gives."""
        self._take(candidate)
        if self.now.alike.get(ours):
            result = self.port.value_of({ours: data}, number)
            self._put(number, candidate.met[0], result)
        else:
            self._put(ours, theirs, data)
        return candidate

    def _replace_by_joined(self, number: int, unknown: list[int], ours: int) -> Candidate | None:
        """Puts the data of several operations in, if the results joined are then theirs, such as a
        query's, a key's and a value's."""
        groups: dict[int, list[int]] = {}
        for meeting in self._near() if len(unknown) == 1 else ():
            for theirs in self.reference.data_inputs(meeting):
                if self.reference.values[theirs].size == self.port.values[ours].size:
                    first = min(self.known.find(self.known.rows[theirs]), default=theirs)
                    groups.setdefault(first, []).append(meeting)
        several = ((n, group) for n, group in groups.items() if 1 < len(group) <= 4)
        for theirs, group in islice(several, NEAR):
            alike = self.known.find(self.known.rows[theirs])
            value = next((x for n in alike if (x := self.reference.value_of(n)) is not None), None)
            for data in () if value is None else islice(turns(value, self._shape(ours)), 12):
                candidates = self._joined(tuple(group), unknown[0])
                found = self._matching_joined(number, candidates, {ours: data})
                if found:
                    return self._take_with(number, found[0], ours, theirs, data)
        return None

    def _replace_and_guess(self, number: int, unknown: list[int], ours: int, met: set[int]) -> bool:
        """Puts values of the reference in that are next in its order, and guesses ahead."""
        size, last = self.port.values[ours].size, max(met, default=0)
        before = min((n for n in self.reference.data if n not in met), default=0)
        near = [n for n in self.reference.data if n not in met and before <= n <= last + 40
                and self.reference.values[n].size == size]  # fmt: skip
        for theirs in near[:NEAR]:
            value = self.reference.value_of(theirs)
            if value is None:
                continue
            data = value.reshape(self._shape(ours))
            self.now.have.add(ours)
            if self._guess(number, unknown, {ours: data}, 3):
                self._put(ours, theirs, data)
                return True
            self.now.have.discard(ours)
        return False

    def _put(self, ours: int, theirs: int, data: np.ndarray) -> None:
        """Goes on with the reference's value in the place of the port's."""
        (row,) = self.port.play({ours: data}, [ours])
        self.now.have.add(ours)
        self.now.rows[ours], self.now.alike[ours] = row, self.known.find(row)
        self.now.replaced[ours], self.now.data[ours] = theirs, data
        stale = self.port.made_of(ours) & self.now.have
        self.now.have -= stale
        self._play(sorted(stale))

    def _of_same_tensors(self, number: int) -> list[int]:
        """The reference's operations that meet what this meets."""
        ours = {_elements(self._source_of(f)) for f in self.port.frontiers(number)}
        return [
            m for m in self.reference.meetings
            if ours & {_elements(self._held(f)) for f in self.reference.frontiers(m)}
        ]  # fmt: skip

    # The answer.

    def result(self) -> Followed:
        names, starts = self.port.names, self.port.starts
        source = {
            name: self.now.source[a:b].reshape(self.port.values[self.port.numbers[name]].shape)
            for name, a, b in zip(names, starts, starts[1:])
        }
        used = self.port.needed & set(self.port.numbers.values())
        unused = [name for name in names if self.port.numbers[name] not in used]
        open_ = [n for n in names if n not in unused and (source[n] == OPEN).all()]
        reference = self.reference
        equal = reference.loss in self.now.met.get(self.port.loss, []) and not self.now.replaced
        return Followed(
            source, dict(zip(reference.names, reference.starts.tolist())),
            {n: reference.values[reference.numbers[n]].shape for n in reference.names},
            open_, unused, [] if equal else self._parts(), equal, self.now.guessed,
            frozenset(self.permuted), self.now.met,
        )  # fmt: skip

    def _parts(self) -> list[PartedAt]:
        theirs = {n for found in self.now.met.values() for n in found}
        ours = {n for n, found in self.now.met.items() if found}
        tolerance, replaced = self.known.tolerance, self.now.replaced
        alive = (
            _alive(self.reference, theirs, set(replaced.values()), self.known.rows, tolerance),
            _alive(self.port, ours, set(replaced), self.now.rows, tolerance),
        )
        ends = [(r, p) for p, r in self.now.replaced.items()]
        if self.reference.loss not in self.now.met.get(self.port.loss, []):
            ends.append((self.reference.loss, self.port.loss))
        found = []
        for end in ends:
            firsts = []
            for side, live, n, cut in zip(
                (self.reference, self.port), alive, end,
                (set(self.now.replaced.values()), set(self.now.replaced)),
            ):  # fmt: skip
                firsts.append(_first_apart(side, live | (cut - {n}), n))
            found.append(part_at(self.reference, firsts[0], self.port, firsts[1]))
        return found


def _is_blank(row: np.ndarray) -> bool:
    """Says if a value is one number throughout."""
    return bool(row[5] == row[6])


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


def _forms(side: SideTape, frontier: int) -> list[np.ndarray]:
    """The elements that a value holds: as they stand in it, and as in the tensor that they are."""
    labels = _present(side.labels(frontier))
    for name in side.names_of(frontier):
        number = side.numbers[name]
        start, shape = int(side.starts[side.names.index(name)]), side.values[number].shape
        if labels.size == prod(shape) and labels.min() == start and labels.shape != shape:
            return [labels, np.arange(start, start + labels.size).reshape(shape)]
    return [labels]


def _present(labels: np.ndarray | None) -> np.ndarray:
    assert labels is not None
    return labels


def _elements(places: np.ndarray) -> bytes:
    return digest(np.sort(places, axis=None))


def _words(groups: Iterable[list[str]]) -> set[str]:
    return {word for group in groups for name in group for word in names.words(name)}
