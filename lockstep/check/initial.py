"""Rung 0: mean, spread and shape of each tensor as `build` leaves it, against sampling errors."""

from collections import Counter
from math import prod

import numpy as np

from lockstep.check.layout import Entry, Piece
from lockstep.check.rungs import Stage
from lockstep.check.sides.port import Port
from lockstep.check.sides.trace import Trace

SIGMAS = 5.0  # of the sampling error of a moment: one in two million by chance
# Of elements: below, a moment of a sample follows its own distribution too little.
FOR_MEAN, FOR_SHAPE, FOR_TAILS = 8, 64, 500


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
