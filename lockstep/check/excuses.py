"""Excuses what a right port may differ by: mends it, and measures what is left.

An excuse never asks what the cause of a difference may be. It does on one side what the other does,
measures the ends again, and excuses what is then within the bound, as if nothing had been there.

Constants that a program makes in float32 need none here: a program in float64 makes them in it, on
both sides (`lockstep_recorder`). What that moves is told beside the verdict.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from lockstep.check import rungs
from lockstep.check.alone import compare_alone
from lockstep.check.causes.differ import CLIP_EPSILON
from lockstep.check.causes.optimizer import CLIP
from lockstep.check.following.tapes import Asked
from lockstep.check.layout import Entry
from lockstep.check.prove import Trial
from lockstep.check.roots.locate import Root, list_some
from lockstep.check.rungs import SMALL, Spot, Stage
from lockstep.check.sides.port import Port
from lockstep.check.sides.trace import Trace
from lockstep.errors import UserError
from lockstep.judge.tolerances import NOISE, NORM
from lockstep_recorder.noise import NUDGES, NudgedWeights
from lockstep_recorder.recording import prefixed

NEARLY = 100  # bounds, within which a gradient may be rounding that its terms leave
UNCERTAIN = 0.5  # relative, of a gradient by rounding: then it is nothing else
Stages = dict[str, Stage]  # by number


@dataclass
class Excused:
    """Holds what an excuse mended, and the largest figure that it leaves, with its bound.

    Attributes:
        spots: the differences without the mend.
        beside: what stands beside the verdict: a user may want to mend it.
    """

    name: str
    spots: list[Spot]
    residual: float
    bound: float
    note: str = ""
    beside: list[Root] = field(default_factory=list)


def constants(reference: Trace, port: Port) -> list[Root]:
    """Tells what float32 constants move a side's loss or gradients by; both ran with these in
    float64."""
    found = []
    for side, facts in (("reference", reference.about), ("port", port.facts)):
        figure = float(facts.get("constants", 0.0))
        if figure > NORM.bound:
            where = f"constants of the {side}"
            rung = Stage(number="2", name="")
            rung.add("constants", where, figure, NORM.bound)
            root = Root("2", where, "forward", rung.spots, [where], rung.spots[0])
            root.entry = "made in float32"
            root.cause = (f"the {side} makes constants in float32; made in float64, as here, they "
                          f"move its loss or gradients by {figure:.2g}")  # fmt: skip
            root.remedy = "make them in float64, or in the dtype of what they meet"
            found.append(root)
    return found


def cancelling(
    stages: Stages, reference: Trace, port: Port, trial: Trial, entries: list[Entry]
) -> Excused | None:
    """Judges gradients by rounding, where that is most of what they are: those that are apart by
    little more than the bound, where no other gradient is further, for their terms nearly cancel;
    and those below 1e-12 of the largest, if no digit of theirs is certain.

    What rounding makes is measured: of the former in the port, of the latter on both sides.
    """
    found = [stages[number] for number in ("3", "3i", "5")]
    spots = [spot for rung in found for spot in rung.spots]
    small = [spot for spot in spots if spot.detail == SMALL]
    others = [spot for spot in spots if spot not in small]
    excused = []
    if small:
        uncertain = _uncertain(port, trial, entries) & _uncertain_there(reference, entries)
        excused += [spot for spot in small if spot.where in uncertain]
    if others and all(s.rule == "gradient" and s.figure <= NEARLY * NORM.bound for s in others):
        noise = port.noise(trial.weights, 1)
        for spot in others:
            own = noise.get(f"grad/{spot.port.partition('[')[0]}", 0.0)
            excused += [spot] if spot.figure <= NOISE.bound * own else []
    for rung in found:
        rung.excused += [spot for spot in excused if spot in rung.every_spot]
    if not excused:
        return None
    apart = sorted({f"{s.where} by {s.figure:.2g}" for s in excused if s not in small})
    note = "gradients apart by no more than the port's own rounding: " + ", ".join(apart)
    figure = max((spot.figure for spot in excused if spot not in small), default=0.0)
    return Excused("rounding", excused, figure, NEARLY * NORM.bound, note if apart else "")


def _uncertain(port: Port, trial: Trial, entries: list[Entry]) -> set[str]:
    """Finds the pieces whose gradient in the port becomes another when weights move by an ulp: it
    is nothing but rounding, such as that of a key's bias."""
    found = set[str]()
    for seed in range(NUDGES):
        moved = port.run(dict(NudgedWeights(trial.weights, seed, "float64"))).grads
        both = (rungs.by_piece(entries, grads, {}) for grads in (trial.free.grads, moved))
        for (name, ours, _, _), (_, other, _, _) in zip(*both):
            if np.linalg.norm(other - ours) >= UNCERTAIN * np.linalg.norm(ours):
                found.add(name)
    return found


def _uncertain_there(reference: Trace, entries: list[Entry]) -> set[str]:
    """Finds the pieces whose gradient in the reference is nothing but rounding, as recorded."""
    pieces = rungs.by_piece(entries, {}, reference.group("grad"))
    spread = rungs.by_piece(entries, {}, reference.group("spread"))
    return {name for (name, _, grad, _), (_, _, moved, _) in zip(pieces, spread)
            if np.linalg.norm(moved) >= UNCERTAIN * np.linalg.norm(grad)}  # fmt: skip


def frozen(stages: Stages, entries: list[Entry], port: Port) -> Excused | None:
    """Excuses gradients that one side alone has, where both optimizers were fed what each side has
    (`Port.own`), and all updates came out equal: one side freezes a tensor in the model, such as by
    `requires_grad`, and the other in the optimizer."""
    moved = stages["4"], stages["4i"]
    if not port.own or any(rung.lacks or rung.spots for rung in moved):
        return None
    names = {str(e.reference) for e in entries if e.port.name in port.own}
    excused = []
    for rung in (stages[number] for number in ("3", "3i", "5")):
        for spot in rung.spots:
            one = spot.ours is not None and spot.theirs is not None and (
                spot.ours.any() != spot.theirs.any())  # fmt: skip
            if spot.rule == "gradient" and one and spot.where in names:
                rung.excused.append(spot)
                excused.append(spot)
    if not excused:
        return None
    worst = max((rung.worst for rung in moved), key=lambda finding: finding.share)
    tensors = list_some(sorted({spot.where.partition("[")[0] for spot in excused}))
    return Excused(
        "frozen by the optimizer",
        excused,
        worst.figure,
        worst.bound,
        f"{tensors}: one side alone has a gradient, and neither optimizer moves them",
    )


def clip(
    stages: Stages, reference: Trace, port: Port, entries: list[Entry],
    again: Callable[[], Asked] | None,
) -> tuple[Excused | None, Trace]:  # fmt: skip
    """Mends torch's clip, which adds 1e-6 to the norm, beside optax's, which adds nothing: torch's
    function runs without it, and rungs 4, 4i and 8 again. Where the large gradients of 4 and 4i
    show no difference, it makes none in a curve.

    Returns:
        Also the reference's trace that the rungs were measured with.
    """
    frameworks = reference.about["framework"], port.facts["framework"]
    numbers = ("4i", "4", "8")
    plain = [stages[number] for number in numbers]
    if sorted(frameworks) != ["jax", "torch"] or not any(rung.spots for rung in plain[:2]):
        return None, reference
    mended = _mended_reference(reference, again) if frameworks[0] == "torch" else reference
    if mended is None:
        return None, reference
    port.mends = frameworks[1] == "torch"
    made = [rungs.updates(port, mended, entries), compare_alone(port, mended, entries),
            rungs.curves(port, mended, entries)]  # fmt: skip
    before, after = ({(rung.number, spot.detail) for rung in each for spot in rung.spots}
                     for each in (plain, made))  # fmt: skip
    if not after < before:
        port.mends = False
        return None, reference
    stages |= dict(zip(numbers, made))
    spots = [spot for rung in plain for spot in rung.spots]
    worst = max((rung.worst for rung in made), key=lambda finding: finding.share)
    root = Root(spots[0].rung, "optimizer", "update", spots, ["optimizer"],
                max(spots, key=lambda spot: spot.share))  # fmt: skip
    root.entry = "optimizer's clip's epsilon"
    ours, theirs = ("0.0", "1e-06") if port.facts["framework"] == "jax" else ("1e-06", "0.0")
    root.cause = f"{CLIP_EPSILON} {ours}, for {theirs}; without it {worst.figure:.2g} is left"
    root.remedy = ("to have it, put this in place of optax.clip_by_global_norm:\n" + CLIP
                   if port.facts["framework"] == "jax" else "leave it: optax has none")  # fmt: skip
    return Excused("torch's clip", spots, worst.figure, worst.bound, beside=[root]), mended


def _mended_reference(reference: Trace, again: Callable[[], Asked] | None) -> Trace | None:
    """Returns the reference's optimizer and curve without the epsilon; None where neither its
    program nor a recording is at hand."""
    if "mended" in reference.about:
        return reference.with_steps(reference.about["mended"], reference.group("mended"))
    if again is None:
        return None
    program, spec = again(), reference.about["batch"]
    weights = prefixed("weights", reference.weights)
    kept = reference.arrays.items()
    fed = {name: x for name, x in kept if name.startswith(("grad/", "fed/")) and "grad/" in name}
    first = prefixed("batch", reference.group("batch/0"))
    batches = {name: x for name, x in kept if name.startswith("batch/")}
    try:
        program.ask("widen", weights | first, batch=spec)
        told, found = program.ask("mended", weights | fed | batches, batch=spec,
                                  steps=len(reference.about["losses"]))  # fmt: skip
    except UserError:
        return None
    return reference.with_steps(told, found)
