"""What a solver is given: operands that both programs share, and what each made of them."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from lockstep.check.layout import Entry
from lockstep.check.modules import Calls
from lockstep.check.port import Port
from lockstep.check.prove import Prover, Trial
from lockstep.check.rungs import Spot
from lockstep.check.trace import Trace
from lockstep.model.params import Arrays
from lockstep.parity.compare import norm_gap

FITS = 1e-10  # relative: a formula in numpy sums in another order than either framework


@dataclass(frozen=True)
class Cause:
    text: str
    remedy: str


@dataclass(frozen=True)
class Evidence:
    reference: Trace
    port: Port
    calls: Calls
    trial: Trial
    entries: list[Entry]
    prover: Prover

    @property
    def framework(self) -> str:
        return self.port.facts["framework"]


@dataclass(frozen=True)
class Scene:
    """One place where the port is wrong, with the reference's own values around it."""

    what: str
    kind: str  # the class of the reference's module
    ours: np.ndarray
    theirs: np.ndarray
    operands: Arrays  # name -> value, the nearest last; "input" is that of the module around
    weights: Arrays  # of the module itself, by the last word of their names
    framework: str


def scene_of(spot: Spot, evidence: Evidence) -> Scene | None:
    calls = evidence.calls
    if spot.ours is None or spot.theirs is None:
        return None
    parents = calls.parents()
    leaf = spot.what == "output" and spot.where not in parents.values()
    around = parents.get(spot.where, "") if spot.what == "input" else spot.where
    operands: Arrays = {}
    if f"in/{around}" in calls.arrays:
        operands["input"] = calls.arrays[f"in/{around}"]
    for call in calls.names:
        if call == spot.where:
            break
        if parents.get(call) == around and f"act/{call}" in calls.arrays:
            operands[call] = calls.arrays[f"act/{call}"]
    module = spot.where.partition("#")[0]
    weights = {}
    for name, x in evidence.reference.weights.items():
        aliases = [name, *calls.aliases.get(name, [])]
        for alias in aliases:
            if leaf and alias.rpartition(".")[0] == module:
                weights[alias.rpartition(".")[2]] = x
    return Scene(spot.what, calls.kinds.get(spot.where, ""), spot.ours, spot.theirs, operands,
                 weights, evidence.framework)  # fmt: skip


def fits(value: np.ndarray | None, target: np.ndarray) -> bool:
    if value is None or value.size != target.size or not np.isfinite(value).all():
        return False
    return norm_gap(value.reshape(target.shape), target) <= FITS


def first_fit(formulas: Iterable[tuple[str, Callable[[], np.ndarray]]], target: np.ndarray) -> str:
    """The name of the first formula that gives the target to rounding; "" where none does."""
    for name, formula in formulas:
        # What has another shape than the formula expects is not what it describes.
        with np.errstate(all="ignore"), suppress(ValueError, IndexError):
            if fits(formula(), target):
                return name
    return ""


def both(
    formulas: Callable[[], Iterable[tuple[str, Callable[[], np.ndarray]]]], scene: Scene
) -> tuple[str, str] | None:
    """The names of the formulas of the reference and of the port, where both are found."""
    theirs = first_fit(formulas(), scene.theirs)
    ours = first_fit(formulas(), scene.ours) if theirs else ""
    return (theirs, ours) if ours and ours != theirs else None
