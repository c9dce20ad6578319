"""Rung 6: what the model gives, of each batch: all of it, also where no loss looks."""

from dataclasses import dataclass, field

import numpy as np

from lockstep.check.following.tapes import LiveTape
from lockstep.check.prove import Trial
from lockstep.check.rungs import Bounds, Stage
from lockstep.check.sides.modules import is_one_value, nearest
from lockstep.check.sides.port import Port
from lockstep.check.sides.trace import Trace
from lockstep.errors import UserError
from lockstep.judge.compare import norm_gap
from lockstep.model.params import Arrays
from lockstep_recorder.recording import outputs_of, prefixed
from lockstep_recorder.wire import group

UNSEEN = "where no loss looks"
ROOT = "act/(root)"
SHOW = "write outputs(model, batch), which returns what the model gives"
CANDIDATES = 40  # of the port's values, the last of an output's size, that are looked at


@dataclass
class Outputs:
    """What was compared.

    Attributes:
        lacks: the reference's outputs that were compared with nothing.
        unseen: an output differs where no loss looks, and nowhere else.
    """

    stage: Stage = field(default_factory=lambda: Stage(number="6", name="model outputs"))
    lacks: list[str] = field(default_factory=list)
    unseen: bool = False


def compare_outputs(
    reference: Trace, port: Port, trial: Trial, later: Arrays, bounds: Bounds
) -> Outputs:
    """Compares what both programs ship, see `recording.outputs_of`.

    The outermost module's output has the other's outermost as its partner. What one side shows by
    no module is sought among all values of the port, of the first batch.

    Args:
        later: `STEP/KEY` of the port's batches; none where the forward pass alone runs.
    """
    first = outputs_of(reference.about["events"], reference.arrays)
    theirs = _by_step(reference.group("output"), first)
    ours = _by_step(later, trial.free.outputs)
    made = Outputs()
    partners = _pair(ours[0], theirs[0], trial)
    values: list[np.ndarray] | None = None
    for key, x in theirs[0].items():
        partner = partners.get(key, "")
        known = [step for step in range(min(len(ours), len(theirs)))
                 if partner in ours[step] and key in theirs[step]]  # fmt: skip
        strict = key.startswith((ROOT, "given/"))
        if partner and (strict or _are_equal(ours[0][partner], x, bounds.of(key, partner))):
            for step in known:
                _add(made, reference, key, step, ours[step][partner], theirs[step][key],
                     bounds.of(f"output/{step}/{key}", f"output/{step}/{partner}"))  # fmt: skip
            continue
        values = _values_of(port, trial, reference) if values is None else values
        alike = [y for y in values if y.size == x.size][-CANDIDATES:]
        found = _like(alike, x, reference.arrays.get(f"d{key}"), bounds.of(key, key))
        if found is None:
            made.lacks.append(_name(key))
        else:
            _add(made, reference, key, 0, found, x, bounds.of(key, key))
    if not theirs[0]:
        made.lacks.append("the model's output, for the reference shows no module")
    return made


def _by_step(found: Arrays, first: Arrays) -> list[Arrays]:
    steps = {int(name.partition("/")[0]) for name in found}
    return [group(found, str(step)) for step in sorted(steps)] or [first]


def _pair(ours: Arrays, theirs: Arrays, trial: Trial) -> dict[str, str]:
    """Maps the reference's outputs to the port's: by their calls, by values, by size in order."""
    paired = {r: p for slots in trial.pairing.slots.values() for p, r in slots.items()}
    found = {key: key for key in theirs if key in ours and key.startswith("given/")}
    if not found:
        found = {r: paired[r] for r in theirs if paired.get(r) in ours}
    for alike in (is_one_value, lambda a, b: a.size == b.size):
        for r in [r for r in theirs if r not in found]:
            free = (p for p in ours if p not in found.values() and alike(ours[p], theirs[r]))
            if p := next(free, ""):
                found[r] = p
    return found


def _are_equal(ours: np.ndarray, theirs: np.ndarray, bound: float) -> bool:
    return ours.size == theirs.size and nearest(ours, theirs)[1] <= bound


def _add(
    made: Outputs, reference: Trace, key: str, step: int, ours: np.ndarray, theirs: np.ndarray,
    bound: float,
) -> None:  # fmt: skip
    if ours.size == theirs.size:
        ours = nearest(ours, theirs)[0].to_theirs(ours)
    figure, detail = norm_gap(ours, theirs), ""
    arrives = reference.arrays.get(f"d{key}")
    if not figure <= bound and step == 0 and arrives is not None and ours.size == theirs.size:
        seen = arrives != 0
        if norm_gap(ours[seen], theirs[seen]) <= bound:
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


def _values_of(port: Port, trial: Trial, reference: Trace) -> list[np.ndarray]:
    """Lists the values of the port, run with the reference's weights on the first batch; none where
    it has no tape."""
    if not port.isolates or reference.about["precision"] != "float64":
        return []
    batch, spec = prefixed("batch", reference.group("batch/0")), reference.about["batch"]
    sizes = {x.size for x in outputs_of(reference.about["events"], reference.arrays).values()}
    try:
        tape = LiveTape(port.program, trial.weights, batch, spec)
        tape.start()
        given = {n: trial.weights[name] for name, n in tape.numbers.items()}
        numbers = [n for n in tape.data if tape.values[n].size in sizes and tape.is_float(n)]
        tape.play(given, [])
        return [x for (x,) in tape.values_of([{}], numbers[-CANDIDATES:]).values()]
    except UserError:
        return []


def _like(
    values: list[np.ndarray], theirs: np.ndarray, arrives: np.ndarray | None, bound: float
) -> np.ndarray | None:
    """Returns the value that is an output in all places, or else wherever the loss looks."""
    turned = [nearest(x, theirs)[0].to_theirs(x) for x in values]
    for x in turned:
        if norm_gap(x, theirs) <= bound:
            return x
    if arrives is None or not (arrives == 0).any() or not arrives.any():
        return None
    seen = arrives != 0
    return next((x for x in turned if norm_gap(x[seen], theirs[seen]) <= bound), None)
