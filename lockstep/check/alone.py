"""Rung 4: many steps of the optimizer alone, and what they leave."""

from collections.abc import Iterator

import numpy as np

from lockstep.check.layout import Entry
from lockstep.check.rungs import (
    ALONE,
    OWN,
    UPDATE,
    Stage,
    by_piece,
    changed_state,
    gap_of,
    largest_finite,
    precision_of,
    variables,
    whole_tensors,
)
from lockstep.check.sides.port import Port, norm_of
from lockstep.check.sides.trace import Trace
from lockstep.check.slots import compare_slots
from lockstep.judge.tolerances import epsilon
from lockstep_recorder.recording import VARIED


def compare_alone(port: Port, reference: Trace, entries: list[Entry]) -> Stage:
    """Rung 4: many steps of the optimizer alone, for its schedule, as far as either side goes.

    What each step moves a tensor by is compared, by its size and its direction; of tensors that are
    fused or stacked on one side, what it moves them by together. A step that neither side survives,
    such as behind a division by zero, is no difference; one before which one side alone ends is.
    """
    rung = Stage(number="4", name="update, alone")
    theirs, fed = reference.group("varied"), reference.group("fed/1/0/grad")
    rung.lacks = reference.about["lacks"].get("optimizer", "" if theirs else "no such run recorded")
    rung.lacks = rung.lacks or port.begin(port.weights(reference.weights))
    if rung.lacks:
        return rung
    steps = max(map(len, theirs.values()))
    ended = bool(reference.about.get("ended"))  # then the port is asked for one step more
    moved = port.alone(port.weights(reference.weights), fed, steps + ended)
    taken = max(map(len, moved.group("varied").values()), default=0)
    if not taken:
        rung.lacks = "the port has no such run"
        return rung
    given = port.grads(fed)
    bound = ALONE if precision_of(port, reference) == "float64" else UPDATE
    found = []
    for tensors, partners in whole_tensors(entries, reference.weights):
        if theirs.keys().isdisjoint(tensors) and given.keys().isdisjoint(partners):
            continue  # buffers
        a, b = (_moved_together(side, names_of, min(taken, steps))
                for side, names_of in ((moved, partners), (reference, tensors)))  # fmt: skip
        size = norm_of({name: reference.weights[name] for name in tensors})
        gradient = max(norm_of({name: side[name] for name in names_of if name in side})
                       for side, names_of in ((fed, tensors), (given, partners)))  # fmt: skip
        least = 16 * epsilon(precision_of(port, reference)) * size / bound
        scales = (largest_finite(b[0]) + least) * np.array([1.0, gradient, size])
        gaps = np.abs(a - b) / np.where(scales > 0, scales, 1.0)[:, None]
        gaps[~np.isfinite(a) & ~np.isfinite(b)] = 0.0
        gaps = gaps.max(0)
        first = int(np.argmax(~(gaps <= bound) if not (gaps <= bound).all() else gaps))
        found.append((first, tensors[0], partners[0], float(gaps.max()), a[0], b[0]))
    for first, r, p, figure, x, y in sorted(found, key=lambda each: each[:2]):
        rule = OWN if port.own else "update"
        rung.add(rule, f"{r}, step {first} of {steps}", figure, bound, p, x, y, r)
    for where, mine, other, p in _left(moved, reference, entries, port, steps):
        rung.add("state", where, gap_of(mine, other), bound, p, mine, other)
    if bound == ALONE:
        compare_slots(rung, moved, reference, entries, steps)
    else:
        rung.uncompared.append("what the optimizer keeps, for it is in the program's own precision")
    _add_thawed(rung, moved, reference, entries, steps)
    for name in _left_alone(moved, reference, entries, port):
        rung.add("state", name, np.inf, 0.0)
    if taken != steps:
        side, why = (("port", port.facts.get("ended")) if taken < steps
                     else ("reference", reference.about["ended"]))  # fmt: skip
        rung.add("end", f"the {side} ends at update {min(taken, steps) + 1}", np.inf, 0.0,
                 detail=str(why))  # fmt: skip
    return rung


def _left(
    moved: Trace, reference: Trace, entries: list[Entry], port: Port, steps: int
) -> Iterator[tuple[str, np.ndarray | None, np.ndarray | None, str]]:
    """Yields what many updates left in state that they change: buffers, and the arrays of variables
    that both sides have, these also after 1, 2, 4, ... updates."""
    ours, theirs = moved.group("left"), reference.group("left")
    before = port.weights(reference.weights)
    changed = {*changed_state(theirs, reference.weights)}, {*changed_state(ours, before)}
    buffers = [e for e in entries if e.reference.name in changed[0] or e.port.name in changed[1]]
    for name, x, y, entry in by_piece(buffers, {**before, **ours}, {**reference.weights, **theirs}):
        yield f"{name}, after {steps} steps", x, y, str(entry.port)
    seen = {name.partition("/")[0] for name in reference.group("kept after")}
    looks = [(n, f"kept after/{n}") for n in sorted(int(n) for n in seen if n.isdecimal())]
    wrong = set[str]()
    for taken, key in [*looks, (steps, "kept left")]:
        for name, mine, other in variables(moved.group(key), reference.group(key), entries):
            if name not in wrong:  # what follows is its echo
                yield f"{name} that update keeps, after {taken} steps", mine, other, name
                wrong |= set() if gap_of(mine, other) <= ALONE else {name}


def _add_thawed(
    rung: Stage, moved: Trace, reference: Trace, entries: list[Entry], steps: int
) -> None:
    """Adds tensors that no update moves, for they have no gradient in the batches, and that a torch
    program trains in some of the updates alone, such as behind a number of steps."""
    sides = [(trace.group("varied"), trace.group("asked")) for trace in (reference, moved)]
    for both in whole_tensors(entries, reference.weights):
        if any(moves.get(name, np.zeros(1)).any() for (moves, _), names_of in zip(sides, both)
               for name in names_of):  # fmt: skip
            continue
        rows = [[asked[name][:steps] for name in names_of if name in asked]
                for (_, asked), names_of in zip(sides, both)]  # fmt: skip
        trained = [np.any(each, 0) if each else None for each in rows]
        theirs, ours = trained
        where = f"{both[0][0]}, step"
        if theirs is not None and ours is not None:
            n = min(len(theirs), len(ours))
            apart = np.flatnonzero(theirs[:n] != ours[:n])
            one_changes = any(len({*each}) == 2 for each in (theirs, ours))
            if len(apart) and one_changes:  # else both freeze it for good, each in its own way
                rung.add("update", f"{where} {apart[0]} of {steps}", np.inf, 0.0, both[1][0],
                         detail=both[0][0])  # fmt: skip
        elif any(each is not None and len({*each}) == 2 for each in trained):
            side = "reference" if ours is None else "port"
            rung.uncompared.append(f"{both[0][0]}, which the {side} trains in some updates, and "
                                   "which has no gradient here")  # fmt: skip


def _left_alone(moved: Trace, reference: Trace, entries: list[Entry], port: Port) -> list[str]:
    """Lists the state that one side's updates change and that has no partner."""
    sides = (("reference", reference, reference.weights),
             ("port", moved, port.weights(reference.weights)))  # fmt: skip
    return [f"{side}'s {name}" for side, trace, before in sides
            for name in changed_state(trace.group("left"), before)
            if not any(getattr(entry, side).name == name for entry in entries)]  # fmt: skip


def _moved_together(moved: Trace, tensors: list[str], steps: int) -> np.ndarray:
    """(3, steps): the norm of what some tensors are moved by, and its inner products with their
    gradients and weights; 0 for what never is, such as a buffer."""
    kinds = [moved.group(kind) for kind in VARIED]
    found = np.zeros((3, steps))
    for name in tensors:
        if name in kinds[0]:
            found += [
                np.square(kinds[0][name][:steps]),
                *(kind[name][:steps] for kind in kinds[1:]),
            ]
    found[0] = np.sqrt(found[0])
    return found
