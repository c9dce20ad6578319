"""Rung 6: what the model gives, of each batch: all of it, also where no loss looks."""

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
from lockstep_recorder.recording import outputs_of, prefixed
from lockstep_recorder.wire import group

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
    """

    stage: Stage = field(default_factory=lambda: Stage(number="6", name="model outputs"))
    lacks: list[str] = field(default_factory=list)
    unseen: bool = False
    turned: list[str] = field(default_factory=list)


def compare_outputs(
    reference: Trace, port: Port, trial: Trial, later: Arrays, bounds: Bounds
) -> Outputs:
    """Compares what both programs ship, see `recording.outputs_of`.

    The model's output is the other's, in its size and in its order of axes, but for channels first
    or last. What one side shows by no module is sought among all values of the port, of the first
    batch; so is a model that ends elsewhere, if its own end is among the reference's values.

    Args:
        later: `STEP/KEY` of the port's batches; none where the forward pass alone runs.
    """
    first = outputs_of(reference.about["events"], reference.arrays)
    theirs = _by_step(reference.group("output"), first)
    ours = _by_step(later, trial.free.outputs)
    made = Outputs()
    partners = _pair(ours[0], theirs[0], trial)
    sought = _Sought(reference, port, trial)
    for key, x in theirs[0].items():
        partner, bound = partners.get(key, ""), bounds.of(key, partners.get(key, ""))
        shown = key.startswith("given/") or (_call(key) == "(root)" and ROOT in ours[0])
        if key == ROOT and shown and not partner and not sought.ends_elsewhere(x, ours[0][ROOT]):
            partner = ROOT  # of another size
        equal = partner and norm_gap(turned(ours[0][partner], x), x) <= bound
        if partner and (shown or equal):
            for step in range(min(len(ours), len(theirs))):
                if partner in ours[step] and key in theirs[step]:
                    y, other = ours[step][partner], theirs[step][key]
                    of = "" if reference.about.get("forward") else "output/0/"  # as noise has it
                    _add(made, reference, key, step, y, other,
                         bounds.of(f"{of}{key}", f"{of}{partner}"))  # fmt: skip
            continue
        found = sought.find(x, reference.arrays.get(f"d{key}"), bound)
        if found is None and shown and key in ours[0].keys() - partners.values():
            found = ours[0][key]  # in its place, and of another size
        if found is None:
            made.lacks.append(_name(key))
        else:
            _add(made, reference, key, 0, found, x, bound)
    if not theirs[0] and not any(map(sought.is_in_reference, ours[0].values())):
        made.lacks.append(f"the model's output, for the reference shows no module: {SHOW}")
    return made


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


def _pair(ours: Arrays, theirs: Arrays, trial: Trial) -> dict[str, str]:
    """Maps the reference's outputs to the port's: those of `outputs` and of the model by their
    places, others by their calls, the rest by size in order."""
    paired = {r: p for slots in trial.pairing.slots.values() for p, r in slots.items()}
    found = {r: paired[r] for r in theirs if paired.get(r) in ours}
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
    made: Outputs, reference: Trace, key: str, step: int, ours: np.ndarray, theirs: np.ndarray,
    bound: float,
) -> None:  # fmt: skip
    if step == 0 and ours.ndim == theirs.ndim and ours.shape != theirs.shape:
        made.turned.append(f"{_name(key)} {ours.shape} for {theirs.shape}")
    ours = turned(ours, theirs)
    figure, detail = gap_beside_fill(ours, theirs), ""
    arrives = reference.arrays.get(f"d{key}")
    if not figure <= bound and step == 0 and arrives is not None and ours.shape == theirs.shape:
        seen = arrives != 0
        if gap_beside_fill(ours[seen], theirs[seen]) <= bound:
            made.unseen, detail = True, f"{UNSEEN}: {_places(ours, theirs, bound)}"
    made.stage.add("result", f"{_name(key)} of batch {step}", figure, bound, key, ours, theirs,
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
        sizes = {x.size for x in outputs_of(reference.about["events"], reference.arrays).values()}
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
