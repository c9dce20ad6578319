"""Rung 6: what the model gives, of each batch: all of it, also where no loss looks."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from lockstep.check import rungs
from lockstep.check.following.tapes import Known, LiveTape, RecordedTape
from lockstep.check.layout import axes_between, usual_orders
from lockstep.check.prove import Trial
from lockstep.check.rungs import Bounds, Stage, gap_beside_fill
from lockstep.check.sides.port import Port
from lockstep.check.sides.trace import Trace
from lockstep.errors import UserError
from lockstep.judge.compare import norm_gap
from lockstep.model.params import Arrays
from lockstep_recorder.operations import fingerprint
from lockstep_recorder.recording import outputs_of, prefixed, shipped
from lockstep_recorder.wire import group

PLACE = "place"  # the rule of a finding: another place in a tuple
UNSEEN = "where no loss looks"
ROOT = "act/(root)"
SHOW = "write outputs(model, batch), which returns what the model gives"
CANDIDATES = 40  # of the port's values, the last of an output's size, that are looked at


@dataclass
class Outputs:
    """Holds the comparison of a model's outputs (rung 6).

    Attributes:
        lacks: the reference's outputs that were compared with nothing.
        unseen: an output differs where no loss looks, and nowhere else.
        turned: outputs whose axes the port has in another order.
        guessed: outputs that one side names and the other numbers, or names otherwise: their values
            or sizes pair them.
    """

    stage: Stage = field(default_factory=lambda: Stage(number="6", name="model outputs"))
    lacks: list[str] = field(default_factory=list)
    unseen: bool = False
    turned: list[str] = field(default_factory=list)
    guessed: list[str] = field(default_factory=list)


def compare_outputs(
    reference: Trace, port: Port, trial: Trial, later: Arrays, bounds: Bounds
) -> Outputs:
    """Compares what both programs ship, see `recording.shipped`.

    An output is the other's of its place, such as `logits` of a dict or 0 of a tuple, in its size
    and in its order of axes, but for channels first or last. What one side shows by no module is
    sought among all values of the port, of the first batch; so is a model that ends elsewhere, if
    its own end is among the reference's values.

    Args:
        later: `STEP/NAME` of the port's batches; none where the forward pass alone runs.
    """
    slots = shipped(reference.about, reference.arrays)
    first = {name: reference.arrays[key] for name, key in slots.items()}
    theirs = _by_step(reference.group("output"), first)
    ours = _by_step(later, trial.free.outputs)
    made = Outputs()
    partners = _pair(ours[0], theirs[0], trial, slots)
    sought = _Sought(reference, port, trial)
    forward = bool(reference.about.get("forward"))

    def bound_of(name: str, partner: str) -> float:
        if forward:  # then noise is that of a run
            return bounds.of(slots.get(name, name), trial.free.slots.get(partner, partner))
        return bounds.of(f"output/0/{name}", f"output/0/{partner}")

    for name, x in theirs[0].items():
        partner = partners.get(name, "")
        bound, arrives = bound_of(name, partner), reference.arrays.get(f"d{slots.get(name, name)}")
        roots = [each for each in ours[0] if _call(each) == "(root)" and each[:6] != "given/"]
        shown = name.startswith("given/") or (_call(name) == "(root)" and bool(roots))
        alone = name == ROOT and ROOT in roots and not partner
        if alone and not sought.ends_elsewhere(x, ours[0][ROOT]):
            partner = ROOT  # of another size
        equal = partner and norm_gap(turned(ours[0][partner], x), x) <= bound
        if partner and (shown or equal):
            for step in range(min(len(ours), len(theirs))):
                if partner in ours[step] and name in theirs[step]:
                    y, other = ours[step][partner], theirs[step][name]
                    _add(made, name, step, y, other, bound, arrives)
            continue
        found = sought.find(x, arrives, bound)
        if found is None and shown and name in ours[0].keys() - partners.values():
            found = ours[0][name]  # in its place, and of another size
        if found is None:
            made.lacks.append(_name(name))
        else:
            _add(made, name, 0, found, x, bound, arrives)
    _add_later(made, ours, theirs, partners, bound_of)
    if not forward:
        _add_evaluated(made, reference, port, trial, partners, bound_of)
    for r, p in partners.items():
        both = f"{_name(r)} with {_name(p)}"
        if r != p and r in ours[0] and p in theirs[0] and is_number(r) and is_number(p):
            made.stage.add(PLACE, both, np.inf, 0.0, p, detail="another place")
        elif is_guess(r, p):
            made.guessed.append(both)
    if not theirs[0] and not any(map(sought.is_in_reference, ours[0].values())):
        made.lacks.append(f"the model's output, for the reference shows no module: {SHOW}")
    return made


def _add_later(
    made: Outputs, ours: list[Arrays], theirs: list[Arrays], partners: dict[str, str],
    bound_of: Callable[[str, str], float],
) -> None:  # fmt: skip
    """Adds what later batches ship besides the first batch's outputs, and what one side alone
    ships there, such as where the other gives None."""
    for step, (mine, others) in enumerate(zip(ours[1:], theirs[1:]), 1):
        new = {name: name for name in {**others, **mine} if name not in theirs[0]
               and name not in ours[0]}  # fmt: skip
        for r, p in {**partners, **new}.items():
            x, y = mine.get(p), others.get(r)
            if x is not None and y is not None and r in new:
                _add(made, r, step, x, y, bound_of(r, p), None)
            elif (x is None) != (y is None):
                made.stage.add("result", f"{_name(r)} of batch {step}", np.inf, 0.0, p, x, y,
                               "one side alone gives it")  # fmt: skip


def _add_evaluated(
    made: Outputs, reference: Trace, port: Port, trial: Trial, partners: dict[str, str],
    bound_of: Callable[[str, str], float],
) -> None:  # fmt: skip
    """Adds what the models give in evaluation, where that is another than in training; it has no
    partner where one side alone, such as a torch module, has such a mode."""
    theirs, ours = reference.group("evaluated"), port.evaluated(trial.weights)
    trained = outputs_of(reference.about, reference.arrays)
    both = (theirs, trained), (ours, trial.free.outputs)
    if all(name in plain and norm_gap(x, plain[name]) <= rungs.NORM.bound
           for found, plain in both for name, x in found.items()):  # fmt: skip
        return
    pairs = [(r, p) for r, p in partners.items() if r in theirs and p in ours]
    for r, p in pairs:
        x, y = turned(ours[p], theirs[r]), theirs[r]
        where = f"{_name(r)} in evaluation"
        made.stage.add("result", where, gap_beside_fill(x, y), bound_of(r, p), p, x, y)
    if not pairs:
        made.lacks.append("what the model gives in evaluation")


def is_number(key: str) -> bool:
    """Says if an output stands at a number alone, as in a tuple."""
    return all(part.isdigit() for part in _path(key).split("."))


def is_guess(r: str, p: str) -> bool:
    """Says if two outputs have other places, of which one has a word. An output alone has none."""
    places = _path(r), _path(p)
    return places[0] != places[1] and "" not in places and not (is_number(r) and is_number(p))


def _path(key: str) -> str:
    return key.partition("given/")[2] or key.partition(":")[2]


def turned(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Returns an output in the other's order of axes, where the shapes tell it."""
    if ours.shape == theirs.shape or ours.size != theirs.size or not theirs.size:
        return ours
    orders = axes_between(ours.shape, theirs.shape)
    usual = usual_orders(max(ours.ndim, theirs.ndim))
    known = [axes for axes in orders if axes.order in usual] or orders
    made = [axes.to_theirs(ours) for axes in known]
    return min(made, key=lambda x: norm_gap(x, theirs))


def _by_step(found: Arrays, first: Arrays) -> list[Arrays]:
    steps = {int(name.partition("/")[0]) for name in found}
    return [group(found, str(step)) for step in sorted(steps)] or [first]


def _pair(ours: Arrays, theirs: Arrays, trial: Trial, slots: dict[str, str]) -> dict[str, str]:
    """Maps the reference's outputs to the port's: by their places where these have words, such as
    logits; those of `outputs` and of the model by their places, others by their calls, the rest by
    size in order.

    Args:
        slots: by name, where the reference has an output.
    """
    named = {name for name in theirs if name in ours and not name[-1].isdigit()
             and name.partition(":")[2] + name.partition("given/")[2]}  # fmt: skip
    by_slot = {key: name for name, key in trial.free.slots.items()}
    paired = {r: by_slot.get(p, p) for held in trial.pairing.slots.values()
              for p, r in held.items()}  # fmt: skip
    found = {name: name for name in named}
    found |= {r: paired[key] for r, key in slots.items() if r in theirs and r not in found
              and paired.get(key) in ours.keys() - named}  # fmt: skip
    found |= {key: key for key in theirs if key in ours
              and (key.startswith("given/") or (_call(key) == "(root)"
                   and ours[key].size == theirs[key].size))}  # fmt: skip
    taken: set[str] = set()
    for r, p in sorted(found.items(), key=lambda pair: pair[0] != pair[1]):
        if p in taken:
            del found[r]
        taken.add(p)
    for is_like in (lambda a, b: np.array_equal(a, b), lambda a, b: a.size == b.size):
        for r in [r for r in theirs if r not in found]:
            free = (p for p in ours if p not in found.values() and is_like(ours[p], theirs[r])
                    and _call(p) == _call(r))  # fmt: skip
            if p := next(free, ""):
                found[r] = p
    return found


def _call(key: str) -> str:
    return key.partition("/")[2].partition(":")[0] if key[:6] != "given/" else "(root)"


def _add(
    made: Outputs, name: str, step: int, ours: np.ndarray, theirs: np.ndarray, bound: float,
    arrives: np.ndarray | None,
) -> None:  # fmt: skip
    """
    Args:
        arrives: the gradient of the first batch's loss by it; None where it has none.
    """
    ours, given = turned(ours, theirs), ours
    if step == 0 and given.shape != theirs.shape and given.size == theirs.size:
        plain = gap_beside_fill(given.reshape(theirs.shape), theirs)
        if gap_beside_fill(ours, theirs) <= bound < plain:
            made.turned.append(f"{_name(name)} {given.shape} for {theirs.shape}")
    figure, detail = gap_beside_fill(ours, theirs), ""
    if not figure <= bound and step == 0 and arrives is not None and ours.shape == theirs.shape:
        seen = arrives != 0
        if gap_beside_fill(ours[seen], theirs[seen]) <= bound:
            made.unseen, detail = True, f"{UNSEEN}: {_places(ours, theirs, bound)}"
    made.stage.add("result", f"{_name(name)} of batch {step}", figure, bound, name, ours, theirs,
                   detail)  # fmt: skip


def _places(ours: np.ndarray, theirs: np.ndarray, bound: float) -> str:
    """Tells where two arrays differ: the indices along the axis along which fewest do."""
    apart = ~(np.abs(ours - theirs) <= bound * np.abs(theirs).max(initial=0.0))
    rows = [np.flatnonzero(apart.any(tuple(k for k in range(apart.ndim) if k != axis)))
            for axis in range(apart.ndim)]  # fmt: skip
    axis = min(range(apart.ndim), key=lambda k: len(rows[k]) / apart.shape[k], default=0)
    some = ", ".join(map(str, rows[axis][:4])) + ", ..." * (len(rows[axis]) > 4)
    return f"{some} of {apart.shape[axis]} along axis {axis}"


def _name(key: str) -> str:
    """output of act/(root), output 1 of act/(root):1; the call of another module."""
    name = key.partition("/")[2]
    if key.startswith("given/"):
        return f"output {name}" if name != "0" else "output"
    call, _, number = name.partition(":")
    word = "output" if call == "(root)" else f"output of {call}"
    return f"{word} {number}" if number else word


class _Sought:
    """The values of both programs on the first batch, with the reference's weights."""

    def __init__(self, reference: Trace, port: Port, trial: Trial) -> None:
        self.reference, self.port, self.trial = reference, port, trial

    @cached_property
    def values(self) -> list[np.ndarray]:
        """The last of the port's values of an output's size; none where it has no tape."""
        reference, port, weights = self.reference, self.port, self.trial.weights
        if not port.isolates or rungs.precision_of(port, reference) != "float64":
            return []
        batch, spec = prefixed("batch", reference.group("batch/0")), reference.about["batch"]
        sizes = {x.size for x in outputs_of(reference.about, reference.arrays).values()}
        try:
            tape = LiveTape(port.program, weights, batch, spec)
            tape.start()
            tape.play({n: weights[name] for name, n in tape.numbers.items()}, [])
            numbers = [n for n in tape.data if tape.values[n].size in sizes and tape.is_float(n)]
            return [x for (x,) in tape.values_of([{}], numbers[-CANDIDATES:]).values()]
        except UserError:
            return []

    def find(
        self, theirs: np.ndarray, arrives: np.ndarray | None, bound: float
    ) -> np.ndarray | None:
        """Returns the value that is an output in all places, or else wherever the loss looks."""
        alike = [turned(x, theirs) for x in self.values if x.size == theirs.size]
        for x in alike:
            if norm_gap(x, theirs) <= bound:
                return x
        if arrives is None or not (arrives == 0).any() or not arrives.any():
            return None
        seen = arrives != 0
        return next((x for x in alike if x.shape == seen.shape
                     and norm_gap(x[seen], theirs[seen]) <= bound), None)  # fmt: skip

    def is_in_reference(self, ours: np.ndarray) -> bool:
        """Says if an output of the port is a value of the reference."""
        try:
            tape = RecordedTape(self.reference.about.get("tape", {}), self.reference.arrays)
        except UserError:
            return False
        return bool(Known(tape.data, tape.rows).find(fingerprint(ours)))

    def ends_elsewhere(self, theirs: np.ndarray, ours: np.ndarray) -> bool:
        """Says if each side's output is a value of the other side's."""
        there = self.is_in_reference(ours)
        return there and self.find(theirs, None, rungs.NORM.bound) is not None
