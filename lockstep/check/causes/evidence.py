"""Evidence for solvers: operands that both programs share, and what each made of them."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from lockstep.check.following.difference import Cause as Cause
from lockstep.check.following.tapes import Asked
from lockstep.check.layout import Entry
from lockstep.check.prove import Prover, Trial
from lockstep.check.rungs import Spot
from lockstep.check.sides.modules import Calls
from lockstep.check.sides.port import Port
from lockstep.check.sides.trace import Trace
from lockstep.judge.compare import norm_gap
from lockstep.model.params import Arrays

FITS = 1e-10  # relative: a formula in numpy sums in another order than either framework
LEFT = 0.01  # of a gap, at most, where it is explained: a small one fits what is not its cause


@dataclass(frozen=True)
class Evidence:
    reference: Trace
    port: Port
    calls: Calls
    trial: Trial
    entries: list[Entry]
    prover: Prover
    again: Callable[[], Asked] | None = None  # starts the reference's program once more

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
    batch: Arrays  # the first
    given: Arrays  # by the name of an operand: what its module is given
    before: tuple[int, ...] = ()  # the shape of what a last linear layer is given
    last: tuple[np.ndarray, np.ndarray | None] | None = None  # its kernel and bias

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value that is sought."""
        return self.before or self.theirs.shape

    @property
    def bound(self) -> float:
        """The largest gap to a value that a formula gives."""
        return min(FITS, LEFT * norm_gap(self.ours, self.theirs))

    def push(self, x: np.ndarray) -> np.ndarray:
        """Applies the last linear layer to a value that is sought."""
        if self.last is None:
            return x
        kernel, bias = self.last
        y = x.reshape(-1, kernel.shape[0]) @ kernel
        return y + bias if bias is not None else y

    def rows(self, x: np.ndarray) -> tuple[int, ...]:
        return (self.shape[0], x.size // self.shape[0])


def scenes_of(spot: Spot, evidence: Evidence) -> Iterator[Scene]:
    """Yields the place itself; and where it ends with a linear layer, what that layer is given.

    A tap after a linear layer is such a place, too: what it shows begins at the tap before it.
    """
    calls = evidence.calls
    if spot.ours is None or spot.theirs is None:
        return
    parents = calls.parents()
    leaf = spot.rule == "output" and spot.where not in parents.values()
    around, before = spot.where, spot.where
    if spot.rule == "input":
        around = parents.get(spot.where, "")
        while around and _are_given_the_same(around, before, calls):
            around, before = parents.get(around, ""), around
    operands = _operands(around, before, calls)
    weights = _weights_of(spot.where, evidence) if leaf else {}
    scene = Scene(spot.rule, calls.kinds.get(spot.where, ""), spot.ours, spot.theirs, operands,
                  weights, evidence.framework, evidence.reference.group("batch/0"),
                  {name: calls.arrays[f"in/{name}"] for name in operands
                   if f"in/{name}" in calls.arrays})  # fmt: skip
    yield scene
    if leaf and spot.where in evidence.trial.tapped:
        inner, operands = spot.where, _operands(parents[spot.where], spot.where, calls)
    else:
        inner = next((c for c in reversed(operands) if c != "input"), "")
        same = inner and np.array_equal(operands[inner].ravel(), spot.theirs.ravel())
        inner = inner if same else ""
    held = _weights_of(inner, evidence) if inner else {}
    kernel, given = held.get("weight", held.get("kernel")), calls.arrays.get(f"in/{inner}")
    if kernel is None or given is None or kernel.ndim != 2 or spot.rule != "output":
        return
    kernel = kernel if calls.kinds[inner] in ("Dense", "Conv1D") else kernel.T
    if kernel.shape == (given.shape[-1], spot.theirs.shape[-1]):
        others = {name: x for name, x in operands.items() if name != inner}
        yield replace(scene, operands=others, before=given.shape, last=(kernel, held.get("bias")))


def _are_given_the_same(outer: str, inner: str, calls: Calls) -> bool:
    """Says if a module hands on what it is given, as a Sequential does to its first."""
    values = [calls.arrays.get(f"in/{call}") for call in (outer, inner)]
    return all(x is not None for x in values) and np.array_equal(*values)  # type: ignore[arg-type]


def _operands(around: str, before: str, calls: Calls) -> Arrays:
    """Collects what the reference's module `around` is given and has made before a call in it."""
    found: Arrays = {}
    if f"in/{around}" in calls.arrays:
        found["input"] = calls.arrays[f"in/{around}"]
    parents = calls.parents()
    for call in calls.names:
        if call == before:
            break
        if parents.get(call) == around and f"act/{call}" in calls.arrays:
            found[call] = calls.arrays[f"act/{call}"]
    return found


def _weights_of(call: str, evidence: Evidence) -> Arrays:
    module, found = call.partition("#")[0], {}
    for name, x in evidence.reference.weights.items():
        for alias in (name, *evidence.calls.aliases.get(name, [])):
            if alias.rpartition(".")[0] == module:
                found[alias.rpartition(".")[2]] = x
    return found


def fits(value: np.ndarray | None, target: np.ndarray, bound: float = FITS) -> bool:
    if value is None or value.size != target.size or not np.isfinite(value).all():
        return False
    return norm_gap(value.reshape(target.shape), target) <= bound


Formulas = Iterable[tuple[str, Callable[[], np.ndarray]]]


def first_fit(formulas: Formulas, target: np.ndarray, scene: Scene) -> str:
    """Names the first formula that gives the target to rounding; "" where none does."""
    bound = scene.bound
    for name, formula in formulas:
        # What has another shape than the formula expects is not what it describes.
        with np.errstate(all="ignore"), suppress(ValueError, IndexError):
            if fits(scene.push(formula()), target, bound):
                return name
    return ""


def both(formulas: Callable[[], Formulas], scene: Scene) -> tuple[str, str] | None:
    """Names the formulas of the reference and of the port, where both are found."""
    theirs = first_fit(formulas(), scene.theirs, scene)
    ours = first_fit(formulas(), scene.ours, scene) if theirs else ""
    return (theirs, ours) if ours and ours != theirs else None
