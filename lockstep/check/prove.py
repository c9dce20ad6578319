"""Trials of a mapping: what is wrong under it, and whether another explains more."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations

from lockstep.check import names, rungs
from lockstep.check.layout import Entry
from lockstep.check.pairing.by_names import exchange
from lockstep.check.pairing.by_values import permuted_modules
from lockstep.check.pairing.entries import Mapping
from lockstep.check.sides.modules import (
    Calls,
    Pairing,
    above,
    begin_elsewhere,
    make_pairing,
    pair_calls,
)
from lockstep.check.sides.port import Port, PortRun
from lockstep.check.sides.trace import Trace
from lockstep.model.params import Arrays

TRIALS = 40  # of a mapping: two runs of the port each
TURNS = 6  # of axes, each in what follows the one before
UNSEEN = 2  # modules that are not compared for a tensor without a partner on both sides
ROUNDED, FAR = 1e-6, 1e-4  # relative: of a constant made in float32 alone, and of more


@dataclass(frozen=True)
class Trial:
    """The port under one mapping: by itself, and fed what the reference had."""

    weights: Arrays
    free: PortRun
    pairing: Pairing
    isolated: PortRun | None  # None of a recorded port
    spots: set[tuple[str, str]]  # what is wrong: a call and its input or output, or the loss

    @property
    def wrong(self) -> set[str]:
        """The modules, and "loss"."""
        return {where.partition("#")[0] for where, _ in self.spots}

    @property
    def tapped(self) -> set[str]:
        """The reference's calls of which the port shows what comes out, and not what goes in."""
        kinds = self.free.calls.kinds
        return {r for p, r in self.pairing.calls.items() if kinds[p] == "tap"}

    def is_inside(self, other: "Trial") -> bool:
        """Says if all that is wrong stands inside of what is wrong there, and so explains it."""
        return bool(self.wrong) and all(
            any(_holds(outer, inner) for outer in other.wrong) for inner in self.wrong
        )


def _holds(outer: str, inner: str) -> bool:
    """Says if one module holds another; the loss holds the model."""
    around = ("loss", "(root)")
    if outer in around:
        return inner not in around[: around.index(outer) + 1]
    return inner.startswith(outer + ".")


def _is_inside(where: str, place: str) -> bool:
    return place in ("", "(root)", where) or where.startswith(place + ".")


class Prover:
    """Runs the port under mappings; the best is kept."""

    def __init__(self, port: Port, reference: Trace, calls: Calls) -> None:
        assert port.mapping
        self.port, self.reference, self.calls = port, reference, calls
        self.mapping: Mapping = port.mapping
        self.left = TRIALS
        self.apart: set[str] = set()  # the reference's modules that end elsewhere than the port's
        self.best = self.trial()

    def trial(self) -> Trial:
        port = self.port
        weights = port.weights(self.reference.weights)
        free = port.run(weights)
        calls = pair_calls(self.mapping.entries, self.calls, free.calls)
        calls = {p: r for p, r in calls.items() if names.wildcard(r) not in self.apart}
        made = partial(make_pairing, calls, self.calls, permuted=permuted_modules(self.mapping))
        pairing = made(free.calls)
        elsewhere = begin_elsewhere(pairing, self.calls, free.calls)
        if elsewhere:
            pairing = made(free.calls, elsewhere=elsewhere)
        first = self._isolate(weights, free, pairing)
        if not first.wrong or not first.isolated:
            return first
        # Fed the reference's values, what is right has the same values, however late it comes.
        trials = [first]
        for guess in (False, True):
            pairing = made(first.isolated.calls, guess=guess, elsewhere=elsewhere)
            if pairing.slots not in [trial.pairing.slots for trial in trials]:
                trials.append(self._isolate(weights, free, pairing))
        best = first
        for later in trials[1:]:
            fewer = len(later.wrong) <= len(best.wrong) and not best.is_inside(later)
            best = later if fewer or later.is_inside(best) else best
        return self._turn(best, partial(made, elsewhere=elsewhere, turned=True))

    def _turn(self, best: Trial, made: Callable[..., Pairing]) -> Trial:
        """Takes inputs in the order of axes in which they are right, if that is less wrong.

        Behind a difference, shapes alone give the order; where two sizes are equal they do not. A
        module that was fed in the wrong order is wrong, and so is what follows, one by one.
        """
        later = best
        for _ in range(TURNS):
            ran = later.isolated
            pairings = [made(ran.calls, guess=guess) for guess in (False, True)] if ran else []
            pairing = next((p for p in pairings if p.slots == best.pairing.slots), later.pairing)
            if not later.wrong or pairing.axes == later.pairing.axes:
                break
            later = self._isolate(best.weights, best.free, pairing)
        return later if later.spots < best.spots else best

    def _isolate(self, weights: Arrays, free: PortRun, pairing: Pairing) -> Trial:
        ran, loss = free, self.reference.about["loss"]
        if self.port.isolates:
            ran = self.port.run(weights, forced=pairing.forced(self.calls))
        bounds = rungs.Bounds(self.reference)
        rung = rungs.activations("2i", "", pairing, self.calls, ran, loss, bounds, [])
        spots = {(spot.where, spot.rule) for spot in rung.spots}
        return Trial(weights, free, pairing, ran if self.port.isolates else None, spots)

    def search(self) -> Trial:
        """Finds which modules end elsewhere than the port's."""
        if self.port.isolates:  # else its weights are as they are
            self._part_boundaries()
        return self.best

    def take_if_right(self, other: Mapping) -> bool:
        """Takes another mapping in place of this if nothing is wrong with it, and each tensor has a
        partner."""
        former, best = [*self.mapping.entries], self.best
        self._become(other.entries)
        self.best = self.trial()
        right = not (self.best.wrong or other.only_reference or other.only_port)
        if right:
            self._take_rest(other)
        else:
            self._become(former)
            self.best = best
        return right

    def try_other(self, other: Mapping) -> Trial:
        """Takes another mapping in place of this, unless more is wrong with it; modules of tensors
        that it leaves without a partner on both sides are not seen, and count as wrong."""
        former, best, apart = [*self.mapping.entries], self.best, self.apart
        left = self.mapping.left_over
        before = len(best.wrong) + UNSEEN * left, left
        self._become(other.entries)
        self.apart = set()  # what ended elsewhere under the other mapping
        self.best = self.trial()
        self._part_boundaries()
        left = other.left_over
        if (len(self.best.wrong) + UNSEEN * left, left) > before:
            self._become(former)
            self.best, self.apart = best, apart
        else:
            self._take_rest(other)
        return self.best

    def _take_rest(self, other: Mapping) -> None:
        for name in ("only_reference", "only_port", "notes"):
            setattr(self.mapping, name, getattr(other, name))

    def _become(self, entries: list[Entry]) -> None:
        self.mapping.entries[:] = entries

    def _part_boundaries(self) -> None:
        """Modules that hold others, and are wrong as a whole alone: one side's last function, such
        as a ReLU, stands in its module and the other's behind it."""
        parents = self.calls.parents()
        around = {outer for r in self.best.pairing.calls.values() for outer in above(r, parents)}
        wrong = [r for r in self.calls.names if r in around & self.best.wrong]
        for place in dict.fromkeys(map(names.wildcard, wrong)):
            self._try_apart({place})
        self._try_apart(self._wrong_inside_alone())

    def _try_apart(self, places: set[str]) -> None:
        """Leaves modules out if fewer places are then wrong, and no other."""
        if not (places and self.best.wrong) or self.left <= 0:
            return
        former, self.apart = self.apart, self.apart | places
        self.left -= 1
        tried = self.trial()
        if tried.spots < self.best.spots:
            self.best = tried
        else:
            self.apart = former

    def _wrong_inside_alone(self) -> set[str]:
        """Finds places at and inside of what is wrong that are wrong, too, in a run of the port by
        itself, though its loss is right: such as of a query that one side scales before its layer
        and the other behind."""
        trial, loss = self.best, self.reference.about["loss"]
        if abs(trial.free.loss - loss) > ROUNDED * abs(loss) or not trial.isolated:
            return set()
        free, isolated = (self._far(ran) for ran in (trial.free, trial.isolated))
        outer = tuple(f"{place}." for place in isolated)
        return {place for place in free if place in isolated or place.startswith(outer)}

    def _far(self, ran: PortRun) -> set[str]:
        """Finds the places of a run that are wrong by more than a constant made in float32 is."""
        loss, bounds = self.reference.about["loss"], rungs.Bounds(self.reference)
        rung = rungs.activations("", "", self.best.pairing, self.calls, ran, loss, bounds, [])
        return {names.wildcard(spot.where) for spot in rung.spots
                if spot.rule != "loss" and spot.figure > FAR}  # fmt: skip

    def exchange_lookalikes(self) -> None:
        """Exchanges siblings of one shape whose names say nothing of which is which, if nothing is
        wrong then: values decide before names that merely look alike. Where modules show what is
        wrong, it is no name."""
        if not self.best.wrong or not self.best.wrong <= {"loss", "(root)"}:
            return
        found = [(a, b, pairs) for a, b, pairs in self._siblings("") if self._tells_nothing(pairs)]
        several = [c for n in (1, 2) for c in combinations(found, n)
                   if len({unit for a, b, _ in c for unit in (a, b)}) == 2 * n]  # fmt: skip
        former, best = list(self.mapping.entries), self.best
        for chosen in several:
            if self.left <= 0 or not exchange(self.mapping, [p for *_, ps in chosen for p in ps]):
                continue
            self.left -= 1
            self.best = self.trial()
            if not self.best.wrong:
                return
            self._become(former)
            self.best = best

    def _tells_nothing(self, pairs: list[tuple[str, str]]) -> bool:
        """Says if neither path nor words of two names tell whose partner is whose."""
        partners = {e.port.name: e.reference.name for e in self.mapping.entries}
        if not all(name in partners for pair in pairs for name in pair):
            return False

        def common(p: str, r: str) -> int:
            return len(names.words(p) & names.words(r))

        return not any(
            common(p, partners[p]) + common(q, partners[q])
            > common(p, partners[q]) + common(q, partners[p])
            or self.mapping.by_path & {p, q}
            for p, q in pairs
        )

    def find_exchange(self, place: str) -> str:
        """Finds two siblings of one parent that the port exchanges, inside a place; "" where none.

        With the exchange nothing in this place is wrong. Names say that the mapping is right: it
        stays.
        """
        for a, b, pairs in self._siblings(place):
            if self._mends(place, lambda: exchange(self.mapping, pairs)):  # noqa: B023
                return f"{a} and {b}"
        return ""

    def find_turned(self, place: str) -> str:
        """Finds a square kernel inside a place of which the port uses the axes in the other order;
        "" where none."""
        kernels: dict[str, list[int]] = {}
        for at, entry in enumerate(self.mapping.entries):
            name = names.wildcard(entry.reference.name)
            if len(entry.choices) == 2 and _is_inside(name, place):
                kernels.setdefault(name, []).append(at)
        for name, numbers in kernels.items():

            def turn(numbers: list[int] = numbers) -> bool:
                for at in numbers:
                    entry = self.mapping.entries[at]
                    self.mapping.entries[at] = replace(entry, chosen=1 - entry.chosen)
                return True

            if self._mends(place, turn):
                return name
        return ""

    def _mends(self, place: str, change: Callable[[], bool]) -> bool:
        """Says if with a change of the mapping, which is taken back, less is wrong, and nothing in
        a place."""
        if self.left <= 0 or not self.port.isolates:
            return False
        former = list(self.mapping.entries)
        if not change():
            return False
        self.left -= 1
        spots = self.trial().spots
        self.mapping.entries[:] = former
        inside = any(_is_inside(names.wildcard(where), place) for where, _ in spots)
        return spots < self.best.spots and not inside

    def _siblings(self, place: str) -> Iterator[tuple[str, str, list[tuple[str, str]]]]:
        units: dict[str, dict[str, Entry]] = {}  # a module, or a tensor without one
        for entry in self.mapping.entries:
            kind = str(names.is_bias(entry.port.name))
            units.setdefault(names.owner(entry.port.name), {})[kind] = entry
        groups: dict[tuple[str, str], list[tuple[str, str]]] = {}
        for a, b in combinations(units, 2):
            shapes = [{leaf: e.port_shape for leaf, e in units[u].items()} for u in (a, b)]
            around = [units[u][next(iter(units[u]))].reference.name for u in (a, b)]
            inside = all(_is_inside(names.wildcard(n), place) for n in around)
            if inside and shapes[0] == shapes[1] and a.rpartition(".")[0] == b.rpartition(".")[0]:
                key = names.wildcard(a), names.wildcard(b)
                groups.setdefault(key, []).extend(
                    (units[a][leaf].port.name, units[b][leaf].port.name) for leaf in units[a]
                )
        for (a, b), pairs in groups.items():
            yield a, b, pairs
