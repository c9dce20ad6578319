"""Pairs the tensors of two programs by the values that they meet, and finds where values part.

The port's tape is walked beside the reference's. Where an operation meets a tensor that has no
partner, the reference's operations on the same data are looked up: their tensor, in the layout with
which the result is the same, is the partner. Names decide where values cannot.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass, field, fields, replace
from itertools import combinations, islice, permutations, product
from math import prod

import numpy as np

from lockstep.check import names
from lockstep.check.following.apart import MOVES, Apart, PartedAt, are_given_alike
from lockstep.check.following.fit import LARGE, Candidate, Fits, elements_of, present
from lockstep.check.following.selections import Selection, parted
from lockstep.check.following.tapes import (
    EQUAL,
    Known,
    LiveTape,
    RecordedTape,
    SideTape,
    are_alike,
    axes_of,
    order_between,
)
from lockstep.check.following.turns import turns
from lockstep.check.layout import Shape
from lockstep.model.params import Arrays
from lockstep_recorder.operations import COLUMNS, fingerprint, marginals

AHEAD = 24  # values made of an operation in which a guess must be confirmed
FURTHEST = 240  # values behind an operation in which these are sought
NEAR = 8  # of the reference's operations that are tried where none has the same data
GUESSES = 24  # layouts of one tensor that are tried ahead
UNITS, WINDOW = 3, 100  # open tensors that are guessed together; values in which they are sought
TOGETHER, MOST_JOINTLY = 24, 400  # layouts of one of them; of all together
FAILURES = 2  # of such guesses, after which none is tried any more
GROUPS = 60  # of operations whose tensors may be joined in one
ORDERS = 12  # of the axes of a value that is put in another's place
MENDS = 4  # places at which values part on the way to one operation
FITTING = 24  # tensors for one operation that are tried in turn
RETURNS = 100  # to an earlier choice, until a later value agrees
ROUNDED = 3e-6  # relative: values in which something was rounded to float32
PRODUCT = re.compile("conv|mm|dot|matmul|attention|softmax")
OPEN = -1  # an element of the port that has no partner


@dataclass
class Followed:
    """Pairs, layouts and the first difference that following the data finds.

    Attributes:
        source: by the port's tensor: for each element the reference's, counted through its tensors
            in order, or OPEN.
        open: the port's tensors that reach the loss and have no partner for some element.
        equal: whether the losses are, with no value of the reference in the place of the port's.
    """

    source: dict[str, np.ndarray]
    starts: dict[str, int]  # of the reference's tensors
    shapes: dict[str, tuple[int, ...]]  # of the reference's tensors
    open: list[str]
    unused: list[str]  # the port's tensors that do not reach the loss
    equal: bool
    permuted: frozenset[str] = frozenset()  # the port's tensors whose order is that of their data
    idle: list[str] = field(default_factory=list)  # the reference's that do not reach the loss

    def partners(self, name: str) -> list[str]:
        """Lists the reference's tensors of which a tensor of the port is made, in its own order."""
        places = self.source[name].reshape(-1)
        names, starts = list(self.starts), np.array(list(self.starts.values()))
        owners = np.searchsorted(starts, places[places != OPEN], "right") - 1
        return [names[owner] for owner in dict.fromkeys(owners.tolist())]


@dataclass(frozen=True)
class Parted:
    """Where values part under a mapping.

    Attributes:
        parts: in the order of the program.
        all: with the reference's values put in there the loss is the reference's: they part nowhere
            else on the way to it, but where a part hides it.
    """

    parts: list[PartedAt]
    all: bool


def follow(
    reference: RecordedTape, port: LiveTape, weights: Arrays, buffers: Arrays | None = None
) -> Followed:
    """Walks the port's tape with the reference's weights.

    Args:
        reference: its tape was recorded with these weights.
        port: its tape was made with its own weights and the same batch.
        weights: the reference's.
        buffers: the port's tensors that are no parameters. Those that the reference computes, such
            as a table of positions, keep their values and need no partner.
    """
    found: list[Followed] = []
    for tolerance in (EQUAL, ROUNDED):  # such as of a table that one side made in float32
        walk = _Walk(reference, port, weights, buffers or {}, tolerance)
        walk.go()
        found.append(walk.result())
        if found[-1].equal or not walk.is_near(ROUNDED):
            break
    return replace(min(found, key=lambda each: len(each.open)), equal=found[0].equal)


def follow_mapped(
    reference: RecordedTape, port: LiveTape, weights: Arrays, partners: Arrays, own: Arrays,
    tolerance: float,
) -> Parted:  # fmt: skip
    """Walks the port's tape under a mapping. Behind a difference it goes on with the reference's
    values, so that the next one is found, too.

    Args:
        weights: the reference's.
        partners: by the port's tensor: for each element the reference's, counted through its
            tensors in order, or OPEN.
        own: the port's tensors, whose elements without a partner keep their values.
        tolerance: relative.
    """
    walk = _Walk(reference, port, weights, {}, tolerance)
    walk.take_all(partners, own)
    walk.go()
    return Parted(walk.parts(), walk.ends_equal)


@dataclass
class Progress:
    """How far a walk has come; it is taken back to an earlier one where a choice was wrong."""

    source: np.ndarray  # by the port's element: the reference's
    used: np.ndarray  # by the reference's element: whether a tensor of the port has it
    have: set[int]  # the port's values that were played
    given: dict[int, np.ndarray]  # the port's pure values that were put in: the reference's places
    replaced: dict[int, int]  # the port's value -> the reference's, which was put in
    parts: list[PartedAt] = field(default_factory=list)  # where the reference's value was put in
    data: dict[int, np.ndarray] = field(default_factory=dict)  # what was put in
    rows: dict[int, np.ndarray] = field(default_factory=dict)  # the port's fingerprints
    alike: dict[int, list[int]] = field(default_factory=dict)  # its value -> the reference's
    met: dict[int, list[int]] = field(default_factory=dict)  # the same, of what was not replaced
    done: set[int] = field(default_factory=set)  # the reference's operations that have partners

    def copied(self) -> "Progress":
        return Progress(**{field.name: copy(getattr(self, field.name)) for field in fields(self)})


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
        self, reference: RecordedTape, port: LiveTape, weights: Arrays, buffers: Arrays,
        tolerance: float,
    ) -> None:  # fmt: skip
        self.reference, self.port = reference, port
        self.constants = _constants(reference, port, buffers)
        elements = [np.ravel(weights[name]) for name in reference.names]
        elements += [np.ravel(x) for x in self.constants.values()]
        self.flat = np.concatenate(elements or [np.zeros(0)])
        self.known = Known(reference.data, reference.rows, tolerance)
        self.fits = Fits(reference, port, self.known, self.flat)
        self.users: dict[int, list[int]] = {}
        for m in reference.meetings:
            for n in reference.data_inputs(m):
                self.users.setdefault(n, []).append(m)
        port.start()
        begun = {n for n, v in enumerate(port.values) if v.op == "batch"}
        self.now = Progress(np.full(port.starts[-1], OPEN), np.zeros(self.flat.size, bool), begun,
                         {}, {})  # fmt: skip
        at = int(reference.starts[-1])
        for name, x in self.constants.items():  # behind the reference's elements
            start = port.starts[port.names.index(name)]
            self.now.source[start : start + x.size] = np.arange(at, at + x.size)
            at += x.size
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
        self.apart: list[np.ndarray] = []  # fingerprints of values that are none of the reference's
        self.returns, self.failures = RETURNS, 0

    def take_all(self, partners: Arrays, own: Arrays) -> None:
        """Takes a mapping; elements without a partner keep the port's values."""
        for name, start, stop in zip(self.port.names, self.port.starts, self.port.starts[1:]):
            at = np.arange(start, stop) - start + self.flat.size
            theirs = partners[name].ravel() if name in partners else np.full(stop - start, OPEN)
            self.now.source[start:stop] = np.where(theirs == OPEN, at, theirs)
            self.flat = np.concatenate([self.flat, np.ravel(own[name])])
        self.fits.flat = self.flat

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
                    best = at, agreeing, self.now.copied()
                returned = self._return()
                if returned is not None:
                    at = returned + 1
                    continue
                self._restore(best[2])
                at = best[0]
                number = self.order[at][1]
            if not agrees and number >= 0:
                self._part(number)
            elif not agrees:
                self._mend(self.reference.loss, self.port.loss)
            if agrees and at >= best[0] >= 0:  # what failed before does so no more
                self.choices = [choice for choice in self.choices if choice.at >= at]
                self.returns = RETURNS
            best = best if self.choices and at < best[0] else (-1, 0, self.now)
            at += 1

    def is_near(self, tolerance: float) -> bool:
        """Says if a value that is none of the reference's is so within another tolerance."""
        known = Known(self.reference.data, self.reference.rows, tolerance)
        return bool(self.apart) and any(known.find_each(np.array(self.apart)))

    def _return(self) -> int | None:
        """Takes the next candidate of the last choice that has one; returns its place."""
        while self.choices and self.returns > 0:
            choice = self.choices[-1]
            if not choice.left:
                self.choices.pop()
                continue
            self.returns -= 1
            self._restore(choice.state.copied())
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
        fresh = [n for n in numbers if not now.alike[n]]
        for n, members in self.port.stacks(fresh, self.known).items():
            now.alike[n] = now.met[n] = members
        self.apart += [now.rows[n] for n in fresh if not now.alike[n]]

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
        if len(found) > 1 and self._shows_nothing(number, found[0]):
            return True
        guessed = [] if found else self._guess(number, unknown)
        if fitting := found or guessed:
            if len(fitting) > 1:
                meetings = {m for c in fitting for m in c.met}
                self.choices.append(
                    Fork(at, number, self.now.copied(), fitting[1:FITTING], meetings)
                )
            self._take(fitting[0] if guessed else self._telling(number, fitting[0]))
        elif not self._guess_jointly(number):
            return False
        self._play([number])
        if found:
            self._settle(number, found[0])
        return True

    def _shows_nothing(self, number: int, candidate: Candidate) -> bool:
        """Plays an operation whose result is one number throughout, such as the product of a first
        state of zeros: its tensor stays open until it is met again."""
        trial = self.fits.trial(candidate)
        row = self.port.attempt([trial], [number])[0, 0]
        if row[5] != row[6]:
            return False
        self.port.play(trial, [])
        self._play([number])
        return True

    def _telling(self, number: int, candidate: Candidate) -> Candidate:
        """Leaves out, of several values, those that do not change the result: they stay open."""
        if len(candidate.places) < 2:
            return candidate
        trial = self.fits.trial(candidate)
        trials = [trial, *(trial | {f: 0 * x + 1} for f, x in trial.items())]
        first, *others = self.port.attempt(trials, [number])[:, 0]
        silent = {f for f, row in zip(trial, others) if np.array_equal(row, first)}
        self.port.play({f: trial[f] for f in silent}, [])  # something must stand there
        places = {f: x for f, x in candidate.places.items() if f not in silent}
        return replace(candidate, places=places)

    def _settle(self, number: int, candidate: Candidate) -> None:
        """Counts a part of the reference's value, or several joined, as like the whole."""
        if number in self.now.have and not self.now.alike[number]:
            alike = [n for m in candidate.met for n in self.known.find(self.known.rows[m])]
            self.now.alike[number] = alike
            self.now.met[number] = [] if number in self.now.replaced else alike

    def _part(self, number: int) -> None:
        """Goes on behind a difference."""
        frontiers = self.port.frontiers(number)
        unknown = [f for f in frontiers if self._is_open(f)]
        self._give([f for f in frontiers if f not in unknown])
        replaced = None
        if unknown:
            replaced = self._replace(number, unknown)
        else:
            for meeting in self._of_same_tensors(number):
                if self._mend(meeting, number):
                    break
        if replaced:
            self.now.have.discard(number)
        if not any(self._is_open(f) for f in frontiers):
            self._play([number])
            if replaced:
                self._settle(number, replaced)

    def _mend(self, meeting: int, number: int) -> bool:
        """Puts the reference's values in where values part on the way to an operation, and where
        they part behind that: the result of an operation or, where one side has one more, what that
        is given; else what the operation is given at the end. Says if its result is then the
        reference's."""
        for _ in range(MENDS):
            if not self._inputs_are_there(number):
                return False
            here = self._apart()
            r, p = here.first(meeting, number)
            if not (self._put_near(here, r, p, meeting, number)
                    or self._put_far(here, r, p, meeting, number)):  # fmt: skip
                return False
            ((row,),) = self.port.attempt([{}], [number])
            if self.fits.comes_of(self.known.find(row), meeting):
                return True
        return False

    def _put_near(self, here: Apart, r: int, p: int, meeting: int, number: int) -> bool:
        """Puts the reference's value in at operations behind which values part: their result or,
        where one side has one more, what the other is given. What follows is right then, or parts
        at other operations, which are given the same."""
        for theirs, ours in [(r, p), *((i, p) for i in self.reference.data_inputs(r)),
                             *((r, i) for i in self.port.data_inputs(p))]:  # fmt: skip
            data = self._fitting(theirs, ours, number)
            if data is not None:
                self._put_and_tell(here, r, p, theirs, ours, data)
                return True
        data = self._candidate(r, p)
        if data is None or data.shape != self.fits.shape(p):
            return False
        before = self.now.copied()
        self._put_and_tell(here, r, p, r, p, data)
        r2, p2 = self._apart().first(meeting, number)
        behind = (self.reference, r2), (self.port, p2)
        if r2 > r and p2 > p and are_given_alike(*behind, self.now.alike):
            return True
        self._restore(before)
        return False

    def _put_far(self, here: Apart, r: int, p: int, meeting: int, number: int) -> bool:
        """Puts the reference's value in where an operation further on is given it. What lies
        between is hidden, but where it is the right value in another order."""
        given = product(self.reference.data_inputs(meeting), self.port.data_inputs(number))
        for theirs, ours in given if number != self.port.loss else ():
            data = self._fitting(theirs, ours, number)
            if data is not None:
                between = self.reference.made_of(r) & self.reference.above([theirs])
                ordered = theirs in self.now.alike.get(ours, ())
                self._put_and_tell(here, r, p, theirs, ours, data, set() if ordered else between)
                return True
        return False

    def _put_and_tell(
        self, here: Apart, r: int, p: int, theirs: int, ours: int, data: np.ndarray,
        hidden: Iterable[int] = (),
    ) -> None:  # fmt: skip
        part = self._told(here, r, p, theirs, ours)
        self.now.parts.append(replace(part, hidden=frozenset(hidden)))
        self._put(ours, theirs, data)

    def _apart(self) -> Apart:
        now = self.now
        return Apart(self.reference, self.port, self.known, now.rows, now.met, now.replaced)

    def _told(self, here: Apart, r: int, p: int, theirs: int, ours: int) -> PartedAt:
        """Tells the operations behind which values part; in the port that which puts the right
        elements in another order, or behind which an operation is missing."""
        part = here.tell(r, p, theirs)
        in_another_order = theirs in self.now.alike.get(ours, ())
        missing = theirs == r and not part.cause and self.port.values[ours].op not in MOVES
        return here.tell(r, ours, theirs) if in_another_order or missing else part

    def _fitting(self, theirs: int, ours: int, number: int) -> np.ndarray | None:
        """Returns the reference's value with its axes as they stand in the port's place: the most
        of what follows is right then, up to an operation; None where nothing is."""
        value = self._candidate(theirs, ours)
        if value is None:
            return None
        behind = self.reference.made_of(theirs)
        ahead = dict.fromkeys([*self._ahead(ours)[1:], number])
        targets = [n for n in ahead if ours < n <= number]
        orders = list(islice(turns(value, self.fits.shape(ours)), ORDERS))
        rows = self.port.attempt([{ours: data} for data in orders], targets)
        right = [sum(bool(behind & {*found}) for found in self.known.find_each(each))
                 for each in rows]  # fmt: skip
        return orders[int(np.argmax(right))] if any(right) else None

    def _candidate(self, theirs: int, ours: int) -> np.ndarray | None:
        """Returns the reference's value, if the trace has it and it may stand in a place."""
        fits = self.port.values[ours].size == self.reference.values[theirs].size
        return self.reference.value_of(theirs) if fits and ours not in self.now.replaced else None

    def _give(self, frontiers: list[int]) -> None:
        fresh = {f: self._source_of(f) for f in frontiers if f not in self.now.given}
        if fresh:
            self.port.play({f: self.flat[places] for f, places in fresh.items()}, [])
            self.now.given |= fresh

    def _is_open(self, frontier: int) -> bool:
        return bool((self._source_of(frontier) == OPEN).any())

    def _source_of(self, frontier: int) -> np.ndarray:
        return self.now.source[present(self.port.labels(frontier))]

    def _take(self, candidate: Candidate) -> None:
        """Makes a candidate the partner."""
        now = self.now
        for frontier, places in candidate.places.items():
            now.source[present(self.port.labels(frontier))] = places
            now.used[places] = True
            now.given[frontier] = places
        if candidate.kind == "permuted":
            self.permuted |= {name for f in candidate.places for name in self.port.names_of(f)}
        if candidate.places:
            self.port.play(self.fits.trial(candidate), [])
        now.done |= set(candidate.met)

    # The reference's operations that had the same data.

    def _decide(self, number: int, unknown: list[int]) -> list[Candidate]:
        """Returns the candidates with which the result is the reference's, the likeliest first."""
        same = [m for d in self.port.data_inputs(number) for n in self.now.alike.get(d, [])
                for m in self.users.get(n, [])]  # fmt: skip
        same = list(dict.fromkeys(same))
        fresh = [m for m in same if m not in self.now.done or self._is_left(m)]
        found = self.fits.matching(number, fresh, unknown)
        if not found and len(unknown) == 1:
            parted = self._parted(number, fresh, {*self.fits.shape(unknown[0])})
            held = {m: self.fits.held(self.reference.frontiers(m)[0]) for m in fresh}
            first = {elements_of(held[m]): m for m in reversed(fresh)}  # use of each tensor
            others = sorted(first.values())
            for count in (2, 3, 4):
                for group in islice(combinations(others, count), GROUPS):
                    for parts in (parts for parts in parted if len(parts) == count):
                        found += self.fits.matching_parts(number, group, unknown[0], parts)
                    if not parted:
                        joined = self.fits.joined(group, unknown[0])
                        found += self.fits.matching_joined(number, joined)
                if found:
                    break
        if not found and len(unknown) == 1 and (orders := self._orders(number)):
            found = self.fits.matching(number, fresh, unknown, orders=orders)
        found = found or self.fits.matching(number, [m for m in same if m not in fresh], unknown)
        ranked = self._ranked(found, unknown)
        return ranked + self._unflattened(number, ranked[0].met[0], unknown) if ranked else []

    def _parted(
        self, number: int, fresh: list[int], lengths: set[int]
    ) -> list[tuple[Selection, ...]]:
        """Finds how the port takes an operation's result apart, where the reference has smaller
        results of the same data."""
        sizes = [self.reference.values[m].size for m in fresh]
        if sum(size < self.port.values[number].size for size in sizes) < 2:
            return []
        later = self.port.data[self.port.data.index(number) + 1 :][:FURTHEST]
        still = {n: {f for f in self.port.frontiers(n) if self._is_open(f)} for n in later}
        ahead = self._ahead(number, also=set().union(*still.values()))
        above = self.port.above(ahead)
        met = {f for n in later if n in above for f in still[n]}
        return parted(self.port, number, ahead, lengths, met)

    def _ranked(self, found: list[Candidate], unknown: list[int]) -> list[Candidate]:
        """Sorts candidates: first those whose tensors the reference uses alike, for what is joined
        is used as one; then by what their names have in common with the port's. Those with elements
        that have a partner are left out, if there are others."""
        words = _words(self.port.names_of(f) for f in unknown)

        def rank(candidate: Candidate) -> tuple[bool, int, float]:
            taken = any(self.now.used[places].any() for places in candidate.places.values())
            theirs = _words(self.reference.names_of(f) for m in candidate.met
                            for f in self.reference.frontiers(m))  # fmt: skip
            uses = {self._use(m) for m in candidate.met}
            return taken, len(uses), -len(words & theirs) / max(len(words | theirs), 1)

        ranks = [rank(candidate) for candidate in found]
        least = min((taken for taken, *_ in ranks), default=False)
        kept = [(r, at) for at, r in enumerate(ranks) if r[0] == least]
        return [found[at] for _, at in sorted(kept)]

    def _use(self, meeting: int) -> tuple[str, ...]:
        """Lists the operations on a result up to that which joins it with other data; what moves it
        is left out."""
        found = []
        for n in self.reference.below(meeting, NEAR):
            found += [self.reference.values[n].op] * (self.reference.values[n].op not in MOVES)
            if len(self.reference.data_inputs(n)) > 1:
                break
        return tuple(found)

    def _orders(self, number: int) -> list[np.ndarray]:
        """Finds in which order the indices of an operation's data stand, where they are those of
        the reference's, such as columns of what is joined the other way round."""
        found: dict[bytes, np.ndarray] = {}
        for d in self.port.data_inputs(number):
            others = [n for n in self.now.alike.get(d, []) if self.reference.marginals_of(n)]
            ours = (
                axes_of(marginals(self.port.value_of({}, d)), self.fits.shape(d)) if others else []
            )
            for n in others:
                for a in ours:
                    for b in self.reference.marginals_of(n):
                        order = order_between(a, b, self.known.tolerance)
                        if order is not None:
                            found.setdefault(order.tobytes(), order)
        return list(found.values())

    def _unflattened(self, number: int, meeting: int, unknown: list[int]) -> list[Candidate]:
        """Returns candidates whose result the port splits into the axes of an image in another
        order than the reference, such as (height, width, channels)."""
        orders = []
        of_image = len(unknown) == 1 and any(
            _is_for_convolution(side, n)
            for side, n in ((self.reference, meeting), (self.port, number))
        )
        for theirs in _split_into(self.reference, meeting) if of_image else ():
            for ours in _split_into(self.port, number):
                orders += [
                    np.arange(prod(theirs)).reshape(theirs).transpose(axes).ravel()
                    for axes in permutations(range(len(theirs)))
                    if ours != theirs and ours == tuple(theirs[axis] for axis in axes)
                ]
        return self.fits.matching(number, [meeting], unknown, orders=orders) if orders else []

    def _is_left(self, meeting: int) -> bool:
        """Says if a part of an operation's tensor has no partner."""
        return any(not self.now.used[self.fits.held(f)].all()
                   for f in self.reference.frontiers(meeting))  # fmt: skip

    # Where none had: another order of the same algebra, or a difference.

    def _ahead(self, number: int, *, also: Iterable[int] = ()) -> list[int]:
        """Lists the operation, and what is made of its result with what is known.

        Args:
            also: pure values that are taken to be known.
        """
        found, known = [number], {number}
        given = self.now.given.keys() | set(also)
        at = self.port.data.index(number) + 1
        for n in self.port.data[at : at + FURTHEST]:
            inputs = self.port.data_inputs(n)
            there = all(i in known or i in self.now.have for i in inputs)
            if there and given.issuperset(self.port.frontiers(n)):
                known.add(n)
                if not set(found).isdisjoint(inputs):
                    found.append(n)
            if len(found) > AHEAD:
                break
        return found

    def _agrees_ahead(self, number: int) -> bool:
        """Says if the result, or what is soon made of it, is a value of the reference."""
        for n in self.port.below(number, AHEAD):  # tensors that have partners, but were not met yet
            self._give([f for f in self.port.frontiers(n) if not self._is_open(f)])
        ahead = self._ahead(number)
        rows = self.port.attempt([{}], ahead)[0]
        return any(self.known.find(row) for row in rows if row[0] > 1)

    def _near(self) -> list[int]:
        """Lists the reference's operations without a partner, or with one for a part of a tensor,
        the next in its order first; those whose tensors have partners, such as a second use, come
        last."""
        near = [m for m in self.reference.meetings if m not in self.now.done or self._is_left(m)]
        return sorted(near, key=lambda m: not self._may_be_left(m))

    def _may_be_left(self, meeting: int) -> bool:
        sizes = (self.reference.values[f].size for f in self.reference.frontiers(meeting))
        return max(sizes, default=0) > LARGE or self._is_left(meeting)

    def _guess(
        self, number: int, unknown: list[int], also: dict[int, np.ndarray] | None = None,
        tries: int = NEAR,
    ) -> list[Candidate]:  # fmt: skip
        """Returns the next tensor that fits, or the next several joined, if a later value confirms
        it; and others that it confirms and that the reference uses on the same data, such as
        another norm's. The likeliest comes first."""
        ahead = self._ahead(number, also=unknown)
        for candidates in islice(self._next_fitting(unknown), tries):
            if first := self._most_confirmed(candidates, ahead, also or {}):
                twins = (self._most_confirmed(each, ahead, also or {})
                         for each in self._twins(first, unknown))  # fmt: skip
                return self._ranked([first, *filter(None, twins)], unknown)
        return []

    def _most_confirmed(
        self, candidates: list[Candidate], ahead: list[int], also: dict[int, np.ndarray]
    ) -> Candidate | None:
        """Returns the candidate that the most later values confirm, of these the first: a sum of
        squares confirms a kernel in any order of its window."""
        rows = self.port.attempt([self.fits.trial(c) | also for c in candidates], ahead)
        best, most = None, 0
        for candidate, each in zip(candidates, rows):
            told = each[each[:, 5] != each[:, 6]]  # one number throughout tells nothing
            confirmed = sum(
                all(self.fits.comes_of(found, meeting) for meeting in candidate.met)
                for found in self.known.find_each(told)
            )
            if confirmed > most:
                best, most = candidate, confirmed
        return best

    def _twins(self, candidate: Candidate, unknown: list[int]) -> Iterator[list[Candidate]]:
        """Yields what else fits, of each operation on the data of a candidate's."""
        if len(candidate.met) > 1:
            return
        (meeting,) = candidate.met
        rows = [self.known.rows[d] for d in self.reference.data_inputs(meeting)]
        same = {m for row in rows for n in self.known.find(row) for m in self.users.get(n, [])}
        for other in self._near():
            if other in same - {meeting}:
                fitting = self.fits.candidates(other, unknown, kinds=(candidate.kind,))
                if some := list(islice(fitting, GUESSES)):
                    yield some

    def _guess_jointly(self, number: int) -> bool:
        """Takes the next tensors that fit several open ones, such as the rows of a kernel that is
        multiplied by hand, or a decay and a bonus that meet in one sum, if a later value confirms
        them together."""
        if self.failures == FAILURES:
            return False
        units = self._open_units(number)
        for count in range(1 if units and len(units[0]) > 1 else 2, len(units) + 1):
            chosen = units[:count]
            filled = {f for unit in chosen for f in unit}
            if any(self._is_open(f) for f in {*self.port.frontiers(number)} - filled):
                continue
            ahead = self._ahead(number, also=filled)
            fitting = [list(islice(self._fit_unit(unit), 1 + TOGETHER // count)) for unit in chosen]
            combined = (_joined(each) for each in product(*fitting))
            candidates = list(islice((c for c in combined if c), MOST_JOINTLY))
            size = sum(candidate.size for candidate in candidates)
            if not candidates or len(ahead) < 2 or size > LARGE:
                continue
            if confirmed := self._most_confirmed(candidates, ahead, {}):
                self._take(confirmed)
                return True
        self.failures += 1
        return False

    def _open_units(self, number: int) -> list[tuple[int, ...]]:
        """Lists the open values from an operation on, in its order; parts of one tensor that follow
        one another are a unit."""
        units: list[list[int]] = []
        at = self.port.data.index(number)
        for n in self.port.data[at : at + WINDOW]:
            for f in self.port.frontiers(n):
                if not self._is_open(f) or any(f in unit for unit in units):
                    continue
                last = units[-1][0] if units else None
                if last is not None and self._are_of_one(last, f):
                    units[-1].append(f)
                else:
                    units.append([f])
        return [tuple(unit) for unit in units[:UNITS]]

    def _are_of_one(self, a: int, b: int) -> bool:
        """Says if two values are parts of one tensor, of one shape."""
        same = self.port.names_of(a) == self.port.names_of(b)
        return same and self.fits.shape(a) == self.fits.shape(b)

    def _fit_unit(self, unit: tuple[int, ...]) -> Iterator[Candidate]:
        """Yields the reference's tensors without a partner that fit a unit, in each layout, the
        next in its order first."""
        shape = len(unit), *self.fits.shape(unit[0])
        seen: set[int] = set()
        for meeting in self._near():
            for frontier in self.reference.frontiers(meeting):
                fits = self.reference.values[frontier].size == prod(shape) <= LARGE
                if not fits or frontier in seen or not self._is_left(meeting):
                    continue
                seen.add(frontier)
                for x in turns(self.fits.held(frontier), shape):
                    yield Candidate((meeting,), dict(zip(unit, x)))

    def _next_fitting(self, unknown: list[int]) -> Iterator[list[Candidate]]:
        near = self._near()
        for meeting in near:
            for kind in ("whole", "part"):
                fitting = self.fits.candidates(meeting, unknown, kinds=(kind,))
                if some := list(islice((c for c in fitting if c.kind == kind), GUESSES)):
                    yield some
        for count in (2, 3, 4) if len(unknown) == 1 else ():
            for group in islice(combinations(near[:AHEAD], count), 100):
                if joined := list(islice(self.fits.joined(group, unknown[0]), GUESSES)):
                    yield joined

    def _replace(self, number: int, unknown: list[int]) -> Candidate | None:
        """Puts the reference's data in, if the result is then the reference's: values parted."""
        floats = [d for d in self.port.data_inputs(number)
                  if self.port.is_float(d) and self.port.values[d].size > 1]  # fmt: skip
        inputs = [d for d in floats if not self.now.alike.get(d)] or floats
        others = [d for d in self.port.data_inputs(number) if d not in inputs]
        if len(inputs) != 1 or not all(d in self.now.have for d in others):
            return None
        ours = inputs[0] if self.now.alike.get(inputs[0]) else self._unmoved(inputs[0])
        met = {n for found in self.now.met.values() for n in found}
        above = {n for i in self.port.above([ours]) for n in self.now.met.get(i, [])}
        meetings = self._near()
        # First what the port has nowhere; then what it has changed once more.
        orders = (lambda d: d not in met, lambda d: d in above)
        for kind in ("whole", "joined", "part"):
            if kind == "joined":
                joined = self._replace_by_joined(number, unknown, ours)
                if joined:
                    return joined
                continue
            fitting = [m for m in meetings if any(self.fits.candidates(m, unknown, kinds=(kind,)))]
            for group in self._by_likeness(fitting, unknown):
                for wanted, meeting in product(orders, group):
                    if found := self._replace_by(number, unknown, ours, meeting, wanted, (kind,)):
                        return found
        if self._replace_and_guess(number, unknown, ours, met):
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
        for data in () if value is None else islice(turns(value, self.fits.shape(ours)), ORDERS):
            found = self.fits.matching(number, [meeting], unknown, {ours: data}, kinds=kinds)
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
            orders = () if value is None else turns(value, self.fits.shape(ours))
            for data in islice(orders, ORDERS):
                candidates = self.fits.joined(tuple(group), unknown[0])
                found = self.fits.matching_joined(number, candidates, {ours: data})
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
            data = value.reshape(self.fits.shape(ours))
            self.now.have.add(ours)
            if guessed := self._guess(number, unknown, {ours: data}, 3):
                self._take(guessed[0])
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
        """Lists the reference's operations that meet what this meets."""
        ours = {elements_of(self._source_of(f)) for f in self.port.frontiers(number)}
        return [
            m for m in self.reference.meetings
            if ours & {elements_of(self.fits.held(f)) for f in self.reference.frontiers(m)}
        ]  # fmt: skip

    # The answer.

    @property
    def ends_equal(self) -> bool:
        """Says if the losses are equal, with what was put in."""
        return self.reference.loss in self.now.met.get(self.port.loss, [])

    @property
    def is_equal(self) -> bool:
        """Says if the losses are equal, with no value of the reference in the port's place."""
        return self.ends_equal and not self.now.replaced

    def parts(self) -> list[PartedAt]:
        """Finds where the values part, in the order of the program."""
        found = list(self.now.parts)
        if not self.ends_equal:
            here = self._apart()
            found.append(here.tell(*here.first(self.reference.loss, self.port.loss)))
        return found

    def result(self) -> Followed:
        names, starts = self.port.names, self.port.starts
        source = {
            name: self.now.source[a:b].reshape(self.port.values[self.port.numbers[name]].shape)
            for name, a, b in zip(names, starts, starts[1:])
        }
        for name in self.constants:
            source[name][...] = OPEN
        idle, unused = ([name for name, number in side.numbers.items() if number not in side.needed]
                        for side in (self.reference, self.port))  # fmt: skip
        alone = {*unused, *self.constants}
        open_ = [n for n in names if n not in alone and (source[n] == OPEN).all()]
        reference = self.reference
        return Followed(
            source, dict(zip(reference.names, reference.starts.tolist())),
            {n: reference.values[reference.numbers[n]].shape for n in reference.names},
            open_, unused, self.is_equal, frozenset(self.permuted), idle,
        )  # fmt: skip


def _constants(reference: RecordedTape, port: LiveTape, buffers: Arrays) -> Arrays:
    """Selects the port's buffers that are constants of the reference; those of one number
    throughout may be state."""
    made = set(reference.constants)
    rows = {n: row for n, row in reference.constant_rows.items() if n in made}
    known = Known([*rows], np.array([*rows.values()]).reshape(-1, COLUMNS), ROUNDED)
    found = {}
    for name in port.names:
        x, value = buffers.get(name), port.values[port.numbers[name]]
        if x is None or "float" not in value.dtype or x.shape != value.shape:
            continue
        row = fingerprint(x)
        if row[5] != row[6] and known.find(row):
            found[name] = x
    return found


def _split_into(tape: SideTape, number: int) -> set[Shape]:
    """Finds the shapes into which the last axis of an operation's result is split soon."""
    shape, size = tape.values[number].held, tape.values[number].size
    if len(shape) < 2:
        return set()
    later = (tape.values[n].held for n in tape.below(number, NEAR) if tape.values[n].size == size)
    return {own[len(shape) - 1 :] for own in later
            if len(own) > len(shape) and own[: len(shape) - 1] == shape[:-1]}  # fmt: skip


def _is_for_convolution(tape: SideTape, number: int) -> bool:
    """Says if the next product of an operation's result is a convolution."""
    later = (tape.values[n].op for n in sorted(tape.made_of(number)))
    return "conv" in next((op for op in later if PRODUCT.search(op)), "")


def _joined(candidates: tuple[Candidate, ...]) -> Candidate | None:
    """Makes one candidate of several; None where two have elements in common."""
    places = {f: x for candidate in candidates for f, x in candidate.places.items()}
    elements = np.concatenate([x.ravel() for x in places.values()])
    if np.unique(elements).size < elements.size:
        return None
    return Candidate(tuple(m for candidate in candidates for m in candidate.met), places)


def _words(groups: Iterable[list[str]]) -> set[str]:
    return {word for group in groups for name in group for word in names.words(name)}
