"""Causes by experiment: a torch program runs again with one thing done otherwise in its calls.

Where the other side's values come out, to rounding, what was changed is the cause. Each module is
fed the reference's own values, so that a root is judged by itself.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from lockstep.check.causes.evidence import FITS, LEFT, Cause, Evidence
from lockstep.check.causes.functions import LINES
from lockstep.check.following.tapes import Asked
from lockstep.check.roots.locate import Root
from lockstep.check.rungs import Pieces, Spot, by_piece
from lockstep.check.sides.modules import Calls, call_of, module_of
from lockstep.errors import UserError
from lockstep.judge.compare import norm_gap
from lockstep.judge.tolerances import NORM
from lockstep.model.params import Arrays
from lockstep_recorder.recording import prefixed
from lockstep_recorder.wire import group

OF_GRADIENTS = ("gradient not stopped", "padding of an embedding", "made in float32")
FACTS = ("factor", "factor of a gradient", "factor of the loss", "left out")
MOST = 5_000_000  # elements of the reference's tensors; more would take minutes
ROUNDED, AS_FAR = 1e-4, 4  # a gap that may be of float32; of what moved constants move it by
IN_FLAX = {"kernel of a convolution": " (transpose_kernel=True)",
           "statistics of a norm": " (use_running_average)"}  # fmt: skip
MEASURED = "the gap is of its rounding"
STOPPED = "the gradient is stopped"
BEHIND = re.compile(" (behind|before) .*")  # which function of torch's a stop stands beside
GAIN = re.compile(r"(^|\.)(weight|scale|gain|gamma|g|w)$")
SPOTS = 8  # of a root, that must fit
KINDS = ("input", "output", "loss", "state", "cotangent", "gradient")
# Entry of the catalogue, what a call did, what it does, and where: "" is everywhere.
Key = tuple[str, str, str, str]
PLACES = 120  # runs with a change in one place alone


def explain(roots: list[Root], evidence: Evidence) -> None:
    """Writes the cause into the roots that one change explains."""
    isolated = [root for root in roots if root.rung in ("2i", "3i")]
    size = sum(x.size for x in evidence.reference.weights.values())
    if size > MOST or not evidence.trial.isolated or not any(map(is_open, isolated)):
        return
    if evidence.again:
        _explain_by_weights(ReferenceSide(evidence, evidence.again()), isolated)
    _explain_by_gains(PortSide(evidence, evidence.port.program), evidence.port.facts, isolated)
    sides = list(_sides_of(evidence))
    for side in sides:
        side.start()
    for supposed in (False, True):
        for side in sides:
            _explain_by(side, isolated, supposed)


def _sides_of(evidence: Evidence) -> "Iterator[ChangedSide]":
    """Yields the sides that can run otherwise, in torch; the port first, for it runs already."""
    if evidence.port.facts["framework"] == "torch":
        yield PortSide(evidence, evidence.port.program)
    if evidence.reference.about["framework"] == "torch" and evidence.again:
        yield ReferenceSide(evidence, evidence.again())


def is_open(root: Root) -> bool:
    """Says if no cause is known, or one that says what is so and not why."""
    return not root.cause or root.entry in FACTS


def name_rounded_constants(roots: list[Root], evidence: Evidence) -> None:
    """Writes the cause into the roots whose gap is no larger than what float32 leaves open of the
    constants that a program makes in it: measured by moving these."""
    open_ones = [root for root in roots if root.rung in ("2i", "3i") and not root.cause
                 and max(spot.figure for spot in root.spots) < ROUNDED]  # fmt: skip
    if not open_ones or not evidence.trial.isolated:
        return
    sides = [side for side in _rounded_sides(evidence)]
    runs = [(side, seen) for side in sides if (seen := side.run(nudges=True)) is not None]
    for root in open_ones:
        moved = [sum(side.moved(spot, seen) for side, seen in runs) for spot in root.spots]
        if all(spot.figure <= AS_FAR * most for spot, most in zip(root.spots, moved)):
            whose = " and ".join(side.name for side in sides)
            root.entry = "made in float32"
            root.cause = f"a constant made in float32 ({whose}): {MEASURED}"
            root.remedy = "make it in float64, or in the dtype of what it meets"


def _rounded_sides(evidence: Evidence) -> "Iterator[ChangedSide]":
    if rounded_of(evidence, "port"):
        yield PortSide(evidence, evidence.port.program)
    if rounded_of(evidence, "reference") and evidence.again:
        side = ReferenceSide(evidence, evidence.again())
        side.start()
        yield side


def rounded_of(evidence: Evidence, side: str) -> list[str]:
    """Lists what a side makes in float32, but for buffers that the other side is given, too."""
    facts = evidence.port.facts if side == "port" else evidence.reference.about
    shared = {f"float32 of {name}" for name in _shared(evidence, side)}
    return [each for each in facts["rounded"] if each not in shared]


def _shared(evidence: Evidence, side: str) -> list[str]:
    return sorted({getattr(entry, side).name for entry in evidence.entries})


def _explain_by_weights(side: "ReferenceSide", roots: list[Root]) -> None:
    """Parameters that the port leaves out: zero of what is added, one of what multiplies."""
    open_ones = [root for root in roots if is_open(root) and root.direction == "forward"]
    side.start()
    for root in open_ones:
        for name, value in product(side.own_parameters(root), (0.0, 1.0)):
            seen = side.run(weights={name: value})
            if seen is not None and side.explains(root, seen):
                root.entry, root.cause = "parameter left out", f"{name} is left out"
                root.remedy = f"use {name} here"
                break


def _explain_by_gains(side: "ChangedSide", facts: dict[str, Any], roots: list[Root]) -> None:
    """Gains of norms: one side multiplies by 1 + gain, and the other by the gain."""
    open_ones = [root for root in roots if is_open(root) and root.direction == "forward"]
    weights = group(side.given(), "weights")
    gains = [name for name in facts["parameters"] if weights[name].ndim == 1
             and GAIN.search(name) and "norm" in kind_of(name, facts).lower()]  # fmt: skip
    words = {1.0: ("the gain", "1 + gain"), -1.0: ("1 + gain", "the gain")}
    for added, (ours, theirs) in words.items() if open_ones and gains else ():
        seen = side.run(weights={name: weights[name] + added for name in gains})
        if seen is None or side.spoils(seen, "forward"):
            continue
        for root in open_ones:
            if side.explains(root, seen):
                root.entry, root.cause = "another norm", f"times {ours}, for times {theirs}"
                root.remedy = f"multiply by {theirs}"


def kind_of(name: str, facts: dict[str, Any]) -> str:
    """Returns the class of the module that holds a tensor."""
    return str(facts["modules"].get(name.rpartition(".")[0], ""))


def _explain_by(side: "ChangedSide", roots: list[Root], supposed: bool) -> None:
    """
    Args:
        supposed: a stop of the gradient is put where the program has none; else what it does is
            done otherwise.
    """
    left = PLACES
    for key, where in side.possible:
        if supposed != key[2].startswith(STOPPED):
            continue
        open_ones = [root for root in roots if is_open(root)
                     and (root.direction == "backward") == (key[0] in OF_GRADIENTS)
                     and side.makes(root, where)]  # fmt: skip
        left -= bool(open_ones) and side.is_alone(key)
        seen = side.run(key) if open_ones and left >= 0 else None
        explained = [root for root in open_ones if seen is not None and side.explains(root, seen)]
        if seen is None or not explained:
            continue
        if side.spoils(seen, open_ones[0].direction):
            continue
        # One number in common fits what has nothing to do with it; more gradients do not.
        number = all(spot.rule == "loss" for root in open_ones for spot in root.spots)
        if number and (side.leaves(seen, roots) or side.vanishes(seen)):
            continue
        of_gradients = key[0] in OF_GRADIENTS and explained != open_ones
        if of_gradients and all(map(_is_one_number, explained)):
            continue
        if key[0] in OF_GRADIENTS and not key[3]:
            key = side.narrow(key, explained)
        # Statistics that are not updated follow from those that are not used.
        for root in [r for r in roots if is_open(r) or r.entry == "running statistics"]:
            if side.explains(root, seen):
                found, fact = side.cause(key), root.cause if root.entry in FACTS else ""
                text = f"{found.text}: {fact}" if fact else found.text
                root.entry, root.cause, root.remedy = found.entry, text, found.remedy
                root.changed = int(side.side == "port"), key[3].rpartition(":")[0]


def _is_one_number(root: Root) -> bool:
    return all(spot.theirs is not None and spot.theirs.size == 1 for spot in root.spots)


def _gaps_of(pairs: dict[str, tuple[np.ndarray, np.ndarray]]) -> dict[str, float]:
    """By name: the relative gap; none where both are nothing but rounding beside the others."""
    size = max((float(np.linalg.norm(x)) for both in pairs.values() for x in both), default=0.0)
    return {name: norm_gap(a, b) if np.linalg.norm(a - b) > NORM.bound * size else 0.0
            for name, (a, b) in pairs.items() if a.shape == b.shape}  # fmt: skip


@dataclass
class ChangedSide:
    """A program that runs with one change, fed the reference's values."""

    evidence: Evidence
    program: Asked
    side = ""

    @property
    def name(self) -> str:
        return f"the {self.side}'s"

    def start(self) -> None:
        """Makes a program ready that was started anew."""

    def given(self) -> Arrays:
        """Weights, batch and forced values."""
        raise NotImplementedError

    def values(self, spot: Spot, seen: Arrays) -> Iterator[np.ndarray]:
        """Yields what may stand at a spot, in the reference's layout."""
        raise NotImplementedError

    def target(self, spot: Spot) -> np.ndarray | None:
        """Returns the other side's value at a spot."""
        raise NotImplementedError

    def words(self, written: str, changed: str) -> tuple[str, str]:
        """Returns what the port does and what the reference does."""
        raise NotImplementedError

    @cached_property
    def possible(self) -> list[tuple[Key, list[str]]]:
        """Asks what can be changed in this program, and in which calls, on the first batch."""
        spec = self.evidence.reference.about["batch"]
        found = self.program.ask("changes", self.plain(), batch=spec)[0]["found"]
        keys: list[tuple[Key, list[str]]] = [(tuple(key), where) for key, where in found]
        self.several = {key[:3] for key, _ in keys if not key[3]}
        # A mean for a sum is a factor: others are tried first. Of two paddings that give the same
        # values, the one with a name.
        return sorted(keys, key=lambda each: (each[0][0] == "reduction", self.is_alone(each[0]),
                                              "(SAME)" not in each[0][2]))  # fmt: skip

    def is_alone(self, key: Key) -> bool:
        """Says if a change is of one place of several."""
        return bool(key[3]) and key[:3] in self.several

    def narrow(self, key: Key, roots: list[Root]) -> Key:
        """Finds the one place of several in which a change is enough; else returns it as it is."""
        for other, _ in self.possible:
            seen = self.run(other) if other[:3] == key[:3] and self.is_alone(other) else None
            if seen is not None and all(self.explains(root, seen) for root in roots):
                return other
        return key

    def makes(self, root: Root, where: list[str]) -> bool:
        """Says if a root's place may follow from one of the calls, in this program, in which
        something can be changed; what stands in a module that has a partner stays inside it."""
        if root.direction == "backward":
            return True
        calls, paired = self.calls()
        parents = calls.parents()
        outer = {o for spot in root.spots for o in self._outer(spot, calls, parents)}
        for call in where:
            inner: str | None = call
            while inner and inner not in outer and inner not in paired:
                inner = parents.get(inner, "")
            if inner in outer:
                return True
        return False

    def _outer(self, spot: Spot, calls: Calls, parents: dict[str, str]) -> set[str]:
        """Finds the calls inside which a spot's value is made; "" is the whole program."""
        call = self.call(spot)
        if spot.rule not in ("input", "output"):
            return {""} if spot.rule == "loss" else {call, *calls.names, ""}
        around = parents.get(call, "")
        if spot.rule == "input":
            return {around}
        return {call} if spot.where in self._begun else {call, around}

    @cached_property
    def _begun(self) -> set[str]:
        """The reference's calls of which both sides show what goes in; another's value may differ
        by what is done before it, such as a padding."""
        trial = self.evidence.trial
        given = {call_of(r) for slots in trial.pairing.slots.values() for r in slots.values()
                 if r.startswith("in/")}  # fmt: skip
        return given - trial.tapped

    def calls(self) -> tuple[Calls, set[str]]:
        """This program's calls, and those that have a partner."""
        raise NotImplementedError

    def call(self, spot: Spot) -> str:
        """This program's call at a spot."""
        raise NotImplementedError

    def plain(self) -> Arrays:
        """Weights and batch."""
        return {k: x for k, x in self.given().items() if not k.startswith("forced/")}

    def run(
        self, key: Key | tuple[()] = (), *, nudges: bool = False,
        weights: dict[str, Any] | None = None,
    ) -> Arrays | None:  # fmt: skip
        """Returns all values of a run with this change; None where it raises.

        Args:
            nudges: constants made in float32 are moved as far as their rounding may have.
            weights: other values of a tensor, or one number for all of it.
        """
        spec, given = self.evidence.reference.about["batch"], self.given()
        for name, value in (weights or {}).items():
            given[f"weights/{name}"] = np.full_like(given[f"weights/{name}"], value)
        shared = _shared(self.evidence, self.side)
        try:
            about, seen = self.program.ask("run", given, batch=spec, change=list(key),
                                           nudges=nudges, shared=shared, quiet=True)  # fmt: skip
        except UserError:
            return None
        return {**seen, "loss": np.array([about["loss"]])}

    def explains(self, root: Root, seen: Arrays) -> bool:
        """Says if the change gives the other side's values in all of the root's places."""
        spots = [spot for spot in root.spots if spot.rule in KINDS][:SPOTS]
        return bool(spots) and all(self._fits(spot, seen) for spot in spots)

    def spoils(self, seen: Arrays, direction: str) -> bool:
        """Says if a change makes something differ that agrees without it."""
        before, after = self._gaps(None, direction), self._gaps(seen, direction)
        return any(gap > FITS >= before[key] for key, gap in after.items() if key in before)

    def leaves(self, seen: Arrays, roots: list[Root]) -> bool:
        """Says if gradients differ behind a change, where no root of the backward pass stands."""
        own = {spot.where for root in roots if root.direction == "backward" for spot in root.spots}
        found = self._gaps(seen, "backward")
        return any(gap > FITS for key, gap in found.items() if not {key, call_of(key)} & own)

    def _gaps(self, seen: Arrays | None, direction: str) -> dict[str, float]:
        """By place: how far the two sides are apart in a direction.

        Args:
            seen: a changed run, in place of this side's.
        """
        trial, reference = self.evidence.trial, self.evidence.reference
        assert trial.isolated
        ours, theirs = trial.isolated.calls.arrays, self.evidence.calls.arrays
        if seen is not None:
            ours, theirs = self.both(seen, ours, theirs)
        if direction == "forward":
            return self._gaps_of_values(ours, theirs, "")
        gaps = self._gaps_of_values(ours, theirs, "d")
        ours, theirs = trial.isolated.grads, reference.group("grad")
        if seen is not None:
            ours, theirs = self.both(group(seen, "grad"), ours, theirs)
        return gaps | self._gaps_of_gradients(ours, theirs)

    def _gaps_of_values(self, ours: Arrays, theirs: Arrays, d: str) -> dict[str, float]:
        pairing = self.evidence.trial.pairing
        pairs = {r: (pairing.value(d + p, ours), pairing.theirs(d + r, theirs))
                 for slots in pairing.slots.values() for p, r in slots.items()}  # fmt: skip
        return _gaps_of({r: (a, b) for r, (a, b) in pairs.items()
                         if a is not None and b is not None})  # fmt: skip

    def _gaps_of_gradients(self, ours: Arrays, theirs: Arrays) -> dict[str, float]:
        pieces = by_piece(self.evidence.entries, ours, theirs)
        return _gaps_of({name: (a, b) for name, a, b, _ in pieces})

    def vanishes(self, seen: Arrays) -> bool:
        """Says if a change takes away the gradient that arrives at one of the reference's modules:
        a loss that no longer depends on a value, such as the maximum of it and a constant, is the
        other side's by chance."""
        before = self.evidence.reference.arrays
        after = self.both(seen, {}, before)[1]
        return any(before[key].any() and not after[key].any() for key in before.keys() & after
                   if key.startswith("dact/"))  # fmt: skip

    def both(self, seen: Arrays, ours: Arrays, theirs: Arrays) -> tuple[Arrays, Arrays]:
        """Puts a changed run in the place of this side's, of the port's and the reference's."""
        raise NotImplementedError

    def _fits(self, spot: Spot, seen: Arrays) -> bool:
        target = self.target(spot)
        bound = min(FITS, LEFT * spot.figure)
        return target is not None and any(
            x.shape == target.shape and norm_gap(x, target) <= bound
            for x in self.values(spot, seen)
        )

    def moved(self, spot: Spot, seen: Arrays) -> float:
        """Returns the relative gap between a run and the plain one at a spot."""
        plain = spot.theirs if self.target(spot) is spot.ours else spot.ours
        gaps = [norm_gap(x, plain) for x in self.values(spot, seen)
                if plain is not None and x.shape == plain.shape]  # fmt: skip
        return min(gaps, default=0.0)

    def cause(self, key: Key) -> Cause:
        entry, written, changed, place = key
        alone = f", at {place}" if self.is_alone(key) else ""
        ours, theirs = self.words(written, changed)
        if entry == "epsilon of a norm":
            eps = theirs.partition(", ")[2]
            text = f"{ours}, for {eps}{alone}"
            word = "eps" if self.evidence.framework == "torch" else "epsilon"
            return Cause(entry, text, f"{word}={eps.removeprefix('eps ')}")
        if entry == "made in float32":
            return Cause(entry, f"{ours}, for {theirs}: {MEASURED}", "")
        if entry == "activation":
            line = LINES[self.evidence.framework].get(theirs, f"compute {theirs}")
            return Cause(entry, f"{ours} for {theirs}{alone}", self.remedy(line, place))
        if entry == "gradient not stopped" and ours.startswith(STOPPED):
            entry = "no gradient"
        if place:  # a function of torch's is none of the program's
            ours, theirs = (BEHIND.sub("", each) for each in (ours, theirs))
            alone = alone or (f", at {place}" if STOPPED in (ours, theirs) else "")
        flax = IN_FLAX.get(entry, "") if self.evidence.framework == "jax" else ""
        return Cause(entry, f"{ours}, for {theirs}{alone}", self.remedy(f"{theirs}{flax}", place))

    def remedy(self, change: str, place: str) -> str:
        """Says where in this program the change is made, or looked up."""
        raise NotImplementedError


class ReferenceSide(ChangedSide):
    """The reference, which is to give the port's values."""

    side = "reference"

    def both(self, seen: Arrays, ours: Arrays, theirs: Arrays) -> tuple[Arrays, Arrays]:
        return ours, seen

    def start(self) -> None:
        self.program.ask("widen", self.plain(), batch=self.evidence.reference.about["batch"])

    def own_parameters(self, root: Root) -> list[str]:
        """Lists vectors and numbers that belong to a root's place, and to no partner inside it."""
        calls, paired = self.calls()
        parents = calls.parents()
        outer = {module_of(o) for spot in root.spots for o in self._outer(spot, calls, parents)}
        inside = {module_of(call) for call in paired} - outer
        owners = {call.replace("(root)", "") for call in outer - inside}
        weights = self.evidence.reference.weights
        small = (n for n in self.evidence.reference.about["parameters"] if weights[n].ndim < 2)
        return [name for name in small if name.rpartition(".")[0] in owners]

    def given(self) -> Arrays:
        reference, calls = self.evidence.reference, self.evidence.calls
        forced: Arrays = {}
        for slots in self.evidence.trial.pairing.slots.values():
            for r in slots.values():
                for key in (r, f"d{r}") if r.startswith("act/") else (r,):
                    if key in calls.arrays:
                        forced[key] = calls.arrays[key]
        return (prefixed("weights", reference.weights) | prefixed("forced", forced)
                | prefixed("batch", reference.group("batch/0")))  # fmt: skip

    def values(self, spot: Spot, seen: Arrays) -> Iterator[np.ndarray]:
        if spot.rule == "loss":
            yield seen["loss"]
        elif spot.rule in ("state", "gradient"):
            arrays = group(seen, "state" if spot.rule == "state" else "grad")
            for entry in self.evidence.entries:
                if str(entry.reference) == spot.where and entry.reference.name in arrays:
                    yield entry.reference.take(arrays)
        else:
            kind = {"input": "in", "output": "act", "cotangent": "dact"}[spot.rule]
            for key, x in seen.items():
                if key.startswith(f"{kind}/") and call_of(key) == spot.where:
                    yield x

    def calls(self) -> tuple[Calls, set[str]]:
        return self.evidence.calls, set(self.evidence.trial.pairing.calls.values())

    def call(self, spot: Spot) -> str:
        return spot.where

    def target(self, spot: Spot) -> np.ndarray | None:
        return spot.ours

    def words(self, written: str, changed: str) -> tuple[str, str]:
        return changed, written

    def remedy(self, change: str, place: str) -> str:
        return f"{change}, as at {place}" if place else change


class PortSide(ChangedSide):
    """The port, which is to give the reference's values."""

    side = "port"

    def both(self, seen: Arrays, ours: Arrays, theirs: Arrays) -> tuple[Arrays, Arrays]:
        return seen, theirs

    def given(self) -> Arrays:
        evidence = self.evidence
        forced = evidence.trial.pairing.forced(evidence.calls)
        return (prefixed("weights", evidence.trial.weights) | prefixed("forced", forced)
                | prefixed("batch", evidence.reference.group("batch/0")))  # fmt: skip

    def values(self, spot: Spot, seen: Arrays) -> Iterator[np.ndarray]:
        pairing, reference = self.evidence.trial.pairing, self.evidence.reference
        if spot.rule == "loss":
            yield seen["loss"]
        elif spot.rule in ("state", "gradient"):
            kind = "state" if spot.rule == "state" else "grad"
            pieces: list[Pieces] = by_piece(self.evidence.entries, group(seen, kind),
                                            reference.group(kind))  # fmt: skip
            yield from (ours for name, ours, _, _ in pieces if name == spot.where)
        else:
            d, kind = {"input": ("", "in/"), "output": ("", "act/"),
                       "cotangent": ("d", "act/")}[spot.rule]  # fmt: skip
            for slots in pairing.slots.values():
                for p, r in slots.items():
                    if r.startswith(kind) and call_of(r) == spot.where:
                        x = pairing.value(d + p, seen)
                        if x is not None:
                            yield x

    def calls(self) -> tuple[Calls, set[str]]:
        trial = self.evidence.trial
        return trial.free.calls, set(trial.pairing.calls)

    def call(self, spot: Spot) -> str:
        return spot.port

    def target(self, spot: Spot) -> np.ndarray | None:
        return spot.theirs

    def words(self, written: str, changed: str) -> tuple[str, str]:
        return written, changed

    def remedy(self, change: str, place: str) -> str:
        return f"at {place}: {change}" if place else f"here: {change}"
