"""Rung 0: mean, spread and shape of each tensor as `build` leaves it, against sampling errors.

Where initial values count (`--initial`), so does what moments do not show: constants in their
places, tensors that begin equal, and orthogonal ones.
"""

from collections import Counter
from collections.abc import Callable
from itertools import combinations
from math import prod

import numpy as np

from lockstep.check.following.tapes import Asked
from lockstep.check.layout import Entry, Piece
from lockstep.check.rungs import Stage
from lockstep.check.sides.port import Port
from lockstep.check.sides.trace import Trace
from lockstep.model.params import Arrays

SIGMAS = 5.0  # of the sampling error of a moment: one in two million by chance
# Of elements: below, a moment of a sample follows its own distribution too little.
FOR_MEAN, FOR_SHAPE, FOR_TAILS = 8, 64, 500
ROUNDED = 1e-5  # relative: of values that one side makes in float32
DRAWN = "the order of drawn initial values inside a tensor"


def compare_initial_values(entries: list[Entry], port: Port, reference: Trace) -> Stage:
    rung = Stage(number="0", name="initial values")
    moments = reference.about["initial"]
    pairs = [(e.reference.name, e.port.name) for e in entries]
    counts = [Counter(names) for names in zip(*{*pairs})] or [Counter(), Counter()]
    done: set[tuple[str, str]] = set()
    for entry, key in zip(entries, pairs):
        if key in done or entry.reference.name not in moments or entry.alias:
            continue
        done.add(key)
        ours, theirs, size = entry.port, entry.reference, prod(entry.shape)
        if counts[0][theirs.name] == counts[1][ours.name] == 1:  # whole, whatever its order
            size *= pairs.count(key)
            ours, theirs = Piece(ours.name), Piece(theirs.name)
        figure, said = farthest_moment(port.moments(ours), {**moments[theirs.name], "size": size})
        rung.add("initial", str(theirs), figure, SIGMAS, str(ours), detail=said)
    return rung


def compare_built(
    rung: Stage, entries: list[Entry], port: Port, reference: Trace,
    again: Callable[[], Asked] | None,
) -> list[str]:  # fmt: skip
    """Adds what is exact in the reference's initial values, and is not so in the port's: constants
    in their places, tensors that begin equal, and orthogonal ones.

    What is drawn, and what is constant, is told by building the reference with another seed.

    Args:
        again: starts the reference's program once more; None where it is not at hand.

    Returns:
        What could not be compared.
    """
    if again is None:
        return [DRAWN, "the places of constant initial values, for the program is not at hand"]
    seed = int(reference.about["seed"])
    theirs, other = (again().ask("build", seed=each)[1] for each in (seed, seed + 1))
    known = {e.reference.name for e in entries} & theirs.keys() & other.keys()
    known = {name for name in known if theirs[name].shape == other[name].shape}
    pieces = [e for e in entries if e.reference.name in known and not e.alias]
    ours = {id(e): e.to_reference(e.port.take(port.initial)) for e in pieces}
    is_fixed = {name: theirs[name] == other[name] for name in known}
    lacks = [DRAWN]
    if known and all(same.all() for same in is_fixed.values()):
        lacks.append("the places of constant initial values, for build draws none by its seed")
        is_fixed = {name: np.zeros_like(same) for name, same in is_fixed.items()}
    different = {spot.where for spot in rung.spots}
    for entry in pieces:
        x, y = entry.reference.take(theirs), ours[id(entry)]
        fixed = _constants(x, entry.reference.take(is_fixed))
        said = ""
        if fixed.any() and not _alike(y[fixed], x[fixed]):
            said = f"{int(fixed.sum())} of {x.size} values are constants, and others in the port"
        elif _is_orthogonal(x) != _is_orthogonal(y):
            side = "reference" if _is_orthogonal(x) else "port"
            said = f"orthogonal in the {side} alone"
        if said and str(entry.reference) not in different:
            rung.add("initial", str(entry.reference), np.inf, SIGMAS, str(entry.port), detail=said)
    for one, two in combinations(pieces, 2):
        if _begin_equal(one, two, theirs, other) and not _alike(ours[id(one)], ours[id(two)]):
            said = f"begins as {one.reference} in the reference, and otherwise in the port"
            rung.add("initial", str(two.reference), np.inf, SIGMAS, str(two.port), detail=said)
    return lacks


def _constants(x: np.ndarray, same: np.ndarray) -> np.ndarray:
    """Selects the values that no seed changes, but for those of a discrete draw, such as of signs:
    these are also among the others."""
    return same if same.all() else same & ~np.isin(x, x[~same])


def _alike(ours: np.ndarray, theirs: np.ndarray) -> bool:
    largest = np.abs(theirs[np.isfinite(theirs)]).max(initial=0.0)
    return np.allclose(ours, theirs, rtol=ROUNDED, atol=ROUNDED * largest, equal_nan=True)


def _is_orthogonal(x: np.ndarray) -> bool:
    """Says if the rows of a matrix, or its columns, are orthogonal and of one length."""
    if x.ndim < 2 or min(x.shape[0], x.size // max(x.shape[0], 1)) < 2:
        return False
    rows = x.reshape(len(x), -1)
    gram = rows @ rows.T if rows.shape[0] <= rows.shape[1] else rows.T @ rows
    size = float(np.trace(gram)) / len(gram)
    return size > 0 and bool(np.abs(gram - size * np.eye(len(gram))).max() <= 1e-4 * size)


def _begin_equal(one: Entry, two: Entry, theirs: Arrays, other: Arrays) -> bool:
    """Says if two pieces of the reference begin with equal values, which are drawn."""
    if one.shape != two.shape or one.reference == two.reference:
        return False
    x, y = (entry.reference.take(theirs) for entry in (one, two))
    x2, y2 = (entry.reference.take(other) for entry in (one, two))
    drawn = x.size > 1 and not np.array_equal(x, x2)
    return drawn and np.array_equal(x, y) and np.array_equal(x2, y2)


def farthest_moment(ours: dict[str, float], theirs: dict[str, float]) -> tuple[float, str]:
    """Measures the gap of moments in sampling errors; tells both sides' figures.

    Of few elements the moments' errors have heavier tails than a normal variable: five of theirs
    are then 1 + 2.5 / (n - 1) times wider for the spread (Fisher's z of n - 1 degrees of freedom;
    3.5 for two elements), and 1 + 5 / (n - 1) times for the mean (Student's t).
    """
    n = int(min(ours["size"], theirs["size"]))
    means = abs(ours["mean"] - theirs["mean"])
    both = [side["std"] if n > 1 else 0.0 for side in (ours, theirs)]
    if min(both) < 1e-12:  # a constant on one side
        same = means <= 1e-6 * max(abs(ours["mean"]), 1e-3) and max(both) < 1e-12
        drawn = n == 1 and not any(map(_is_round, (ours["mean"], theirs["mean"])))
        said = [_say(side, n) for side in (ours, theirs)]
        note = f"{said[0]}, reference {said[1]}"
        return 0.0 if same or drawn else np.inf, note
    sizes, few = 1 / ours["size"] + 1 / theirs["size"], 1 / (n - 1)
    tail = max(theirs["kurtosis"], 1.5) - 1 if n >= FOR_SHAPE else 2.0  # a normal variable's
    error = np.sqrt(tail / 4 * (sizes if n >= FOR_SHAPE else 2 * few)) * (1 + 2.5 * few)
    spreads = abs(np.log(ours["std"] / theirs["std"])) / error
    means = means / (max(both) * np.sqrt(sizes) * (1 + 5 * few)) if n >= FOR_MEAN else 0.0
    tails = abs(ours["kurtosis"] - theirs["kurtosis"]) / np.sqrt(24 * sizes)
    tails = tails if n >= FOR_TAILS else 0.0
    note = f"standard deviation {ours['std']:.4g}, reference {theirs['std']:.4g}"
    if tails > SIGMAS >= max(spreads, means):
        note = f"kurtosis {ours['kurtosis']:.2f}, reference {theirs['kurtosis']:.2f}: "
        note += "another distribution"
    elif means > SIGMAS >= spreads:
        note = f"mean {ours['mean']:.4g}, reference {theirs['mean']:.4g}"
    return float(np.max([spreads, means, tails])), note


def _is_round(x: float) -> bool:
    """Says if a number was chosen, not drawn, such as 0, 1 or 0.5."""
    return float(64 * x).is_integer()


def _say(moments: dict[str, float], n: int) -> str:
    """Tells a tensor's only number, its constant, or its spread."""
    if n == 1:
        return f"{moments['mean']:.4g}"
    mean, std = moments["mean"], moments["std"]
    return f"constant {mean:.4g}" if std < 1e-12 else f"standard deviation {std:.4g}"
