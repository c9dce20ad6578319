"""What an optimizer keeps for each tensor, such as moments and counts of steps, after some steps in
which both sides were fed alike.

Updates show most of it, but not what an `update` keeps there for later, or where a count begins.
"""

from collections.abc import Iterator

import numpy as np

from lockstep.check.layout import Entry
from lockstep.check.rungs import ALONE, Stage, whole_tensors
from lockstep.check.sides.port import norm_of
from lockstep.check.sides.trace import Trace
from lockstep.model.params import Arrays
from lockstep_recorder.recording import LOOKED

Slots = dict[str, np.ndarray]  # by key: a row for each look, see `recording.alone`


def compare_slots(
    rung: Stage, moved: Trace, reference: Trace, entries: list[Entry], steps: int
) -> None:
    """Adds what both sides keep under one key and is not equal. What has another key is paired by
    its values, up to a factor; what then has no partner is compared with nothing.

    Args:
        rung: that of the optimizer alone.
        moved: what the port's optimizer did.
        steps: how many both took.
    """
    theirs, ours = reference.group("slot"), moved.group("slot")
    grads, weights = reference.group("fed/1/0/grad"), reference.weights
    lacks = dict[str, str]()
    for tensors, partners, place in _places(entries, reference):
        sizes = [norm_of({name: side[name] for name in tensors if name in side})
                 for side in (grads, weights)]  # fmt: skip
        held = _of(theirs, tensors), _of(ours, partners)
        for key in sorted(held[0].keys() & held[1].keys()):
            figure = _gap(held[1][key], held[0][key], sizes)
            rung.add("state", f"{place}{_name(key)} in the optimizer", figure, ALONE, partners[0])
        for side, own, other in (("reference", *held), ("port", *held[::-1])):
            others = [x for key, x in other.items() if key not in own]
            for key, x in own.items():
                if key not in other and not (
                    _says_nothing(x, steps) or _is_among(x, others, sizes)
                ):
                    lacks[key] = side
    rung.uncompared += [f"{_name(key)}, which the {side}'s optimizer keeps"
                        for key, side in sorted(lacks.items())]  # fmt: skip


def _places(entries: list[Entry], reference: Trace) -> Iterator[tuple[list[str], list[str], str]]:
    """Yields tensors with their partners, and what stands for none."""
    for tensors, partners in whole_tensors(entries, reference.weights):
        yield tensors, partners, f"{tensors[0]}: "
    yield [""], [""], ""


def _of(slots: Arrays, tensors: list[str]) -> Slots:
    """Returns what is kept for some tensors together: by key."""
    found: dict[str, list[np.ndarray]] = {}
    for name, x in slots.items():
        key, _, tensor = name.partition("/")
        if tensor in tensors:
            found.setdefault(key, []).append(x)
    return {key: _together(rows) for key, rows in found.items()}


def _together(rows: list[np.ndarray]) -> np.ndarray:
    """Returns the norm of several parts, and their inner products; of numbers the largest."""
    if rows[0].shape[1] == 1:
        return np.max(rows, 0)
    whole = np.sum(rows, 0)
    whole[:, 0] = np.sqrt(sum(row[:, 0] ** 2 for row in rows))
    return whole


def _gap(ours: np.ndarray, theirs: np.ndarray, sizes: list[float]) -> float:
    """Returns the largest gap of all looks, relative to the largest norm there; of inner products
    with two arrays of these sizes, to the largest that these could be."""
    if ours.shape != theirs.shape:
        return np.inf
    shown = np.isfinite(ours) | np.isfinite(theirs)
    largest = np.abs(theirs[:, 0]).max(initial=0.0, where=np.isfinite(theirs[:, 0]))
    scales = largest * np.array([1.0, *sizes][: theirs.shape[1]])
    gaps = np.abs(ours - theirs) / np.where(scales > 0, scales, 1.0)
    return float(np.nan_to_num(gaps[shown], nan=np.inf).max(initial=0.0))


def _says_nothing(x: np.ndarray, steps: int) -> bool:
    """Says if a value is zero at each look, or a number that counts steps from 0 or 1."""
    taken = np.array([*LOOKED, steps - 1][-len(x) :]) + 1
    counts = x.shape[1] == 1 and x[0, 0] in (0, 1) and (x == np.round(x)).all()
    return not x.any() or bool(counts and (x[:, 0] >= 0).all() and (x[:, 0] <= taken).all())


def _is_among(x: np.ndarray, others: list[np.ndarray], sizes: list[float]) -> bool:
    """Says if a value is another's, times one factor at all looks."""
    for y in others:
        if x.shape == y.shape and np.isfinite(y).all() and y.any():
            factor = np.vdot(y[:, 0], x[:, 0]) / np.vdot(y[:, 0], y[:, 0])
            if _gap(factor * y, x, sizes) <= ALONE:
                return True
    return False


def _name(key: str) -> str:
    """SGD.momentum_buffer of torch.optim.sgd.SGD.momentum_buffer."""
    return ".".join(key.split(".")[-2:])
