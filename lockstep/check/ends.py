"""Measures the ends, of which the verdict is made, and what locates a difference between them."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.check import excuses, notes, rungs
from lockstep.check.align import Alignment
from lockstep.check.alone import compare_alone
from lockstep.check.excuses import Excused
from lockstep.check.initial import compare_initial_values
from lockstep.check.layout import Entry
from lockstep.check.outputs import Outputs, compare_outputs
from lockstep.check.pairing.entries import Mapping
from lockstep.check.prove import Trial
from lockstep.check.rungs import Bounds, Spot, Stage
from lockstep.check.sides.modules import Calls
from lockstep.check.sides.port import Port
from lockstep.check.sides.trace import Trace
from lockstep.model.params import Arrays

FORWARD = "forward pass only (--forward)"
DIFFERENTIATES = (
    "a program differentiates inside its loss: what arrives at a module is not its gradient"
)
TRAINING = (("4i", "update, isolated"), ("4", "update, alone"), ("5", "accumulation"),
            ("8", "loss curves"))  # fmt: skip


@dataclass(frozen=True)
class Ends:
    """Holds all rungs, by number, and what excuses mended of them.

    Attributes:
        outputs: what the comparison of the models' outputs found besides its rung.
        reference: the trace that the optimizer's rungs were measured with: where torch's clip is
            mended, not the one that was recorded.
    """

    stages: dict[str, Stage]
    outputs: Outputs
    excused: list[Excused]
    reference: Trace

    @property
    def spots(self) -> list[Spot]:
        """Returns all differences that no excuse has mended, but those of initial values."""
        return [spot for stage in self.stages.values() for spot in stage.spots if spot.rung != "0"]


def compare_ends(aligned: Alignment) -> Ends:
    """Measures all rungs, and tries each excuse on what differs."""
    reference, port, trial, entries = (
        aligned.reference, aligned.port, aligned.trial, aligned.entries
    )  # fmt: skip
    bounds = _bounds(reference, port, trial)
    stages, outputs = measure(reference, port, aligned.calls, trial, aligned.mapping, bounds)
    if reference.about.get("forward"):
        return Ends(stages, outputs, [], reference)
    clipped, mended = excuses.clip(stages, reference, port, entries, aligned.again)
    found = [clipped, excuses.frozen(stages, entries, port)]
    if aligned.is_exact and port.isolates:
        found.append(excuses.cancelling(stages, reference, port, trial, entries))
    return Ends(stages, outputs, [each for each in found if each], mended)


def measure(
    reference: Trace, port: Port, calls: Calls, trial: Trial, found: Mapping, bounds: Bounds
) -> tuple[dict[str, Stage], Outputs]:
    """Measures all rungs, by number: the ends, and what locates them."""
    entries, forward = found.entries, reference.about.get("forward")
    climbed = [compare_initial_values(entries, port, reference), _mapping_rung(found)]
    climbed += _runs(reference, port.facts, calls, trial, entries, bounds)
    later: Arrays = {}
    alone: list[str] = []
    port.own = {} if forward else _own_gradients(reference, port, trial, entries)
    if forward:
        climbed += [Stage(number=number, name=name, lacks=FORWARD) for number, name in TRAINING]
    else:
        rung, later, alone = rungs.accumulation(port, reference, entries, bounds)
        for name in notes.unmatched_state(reference, trial, entries):
            rung.add("state", name, math.inf, 0.0)
        climbed += [rungs.updates(port, reference, entries),
                    compare_alone(port, reference, entries), rung,
                    rungs.curves(port, reference, entries)]  # fmt: skip
    stages = {rung.number: rung for rung in climbed}
    outputs = compare_outputs(reference, port, trial, later, bounds)
    stages["6"] = outputs.stage
    outputs.lacks += [f"{name}, which loss moves" for name in alone]
    if outputs.unseen:  # then what differs inside, where no loss looks, locates it
        again = _runs(reference, port.facts, calls, trial, entries, bounds, masks=False)
        stages |= {rung.number: rung for rung in again if rung.number in ("2", "2i")}
    return stages, outputs


def _own_gradients(reference: Trace, port: Port, trial: Trial, entries: list[Entry]) -> Arrays:
    """Returns the port's gradients of its tensors of which one side alone has any: an optimizer is
    fed what its own program gives it."""
    grads = {n: trial.free.grads[n] for n in port.facts["parameters"] if n in trial.free.grads}
    port.own = {}
    fed = port.grads(reference.group("grad"))
    found: Arrays = {}
    for _, _, _, entry in rungs.one_sided(entries, grads, reference.group("grad")):
        name = entry.port.name
        if name in grads:
            whole = found.setdefault(name, np.array(fed[name]))
            if entry.port.cuts:
                entry.port.take(found)[...] = entry.port.take(grads)
            else:
                whole[...] = grads[name]
    return found


def _runs(
    reference: Trace, facts: dict[str, Any], calls: Calls, trial: Trial, entries: list[Entry],
    bounds: Bounds, *, masks: bool = True,
) -> list[Stage]:  # fmt: skip
    """Rungs 2 and 3, and where the port can be fed, 2i and 3i."""
    loss, pairing = reference.about["loss"], trial.pairing
    inside = any(about.get("differentiates") for about in (reference.about, facts))
    climbed = []
    for suffix, word, ran in (("", "", trial.free), ("i", ", isolated", trial.isolated)):
        if ran is None:
            why = "a trace cannot be fed the reference's values; check the program itself"
            climbed += [Stage(number="2i", name="activations, isolated", lacks=why),
                        Stage(number="3i", name="gradients, isolated", lacks=why)]  # fmt: skip
            continue
        climbed.append(
            rungs.activations(f"2{suffix}", f"activations{word}", pairing, calls, ran, loss, bounds,
                              rungs.states(entries, ran.state, trial.weights, reference),
                              masks=masks)
        )  # fmt: skip
        number, name = f"3{suffix}", f"gradients{word}"
        if reference.about.get("forward"):
            climbed.append(Stage(number=number, name=name, lacks=FORWARD))
        elif suffix and inside:
            climbed.append(Stage(number=number, name=name, lacks=DIFFERENTIATES))
        else:
            climbed.append(rungs.gradients(number, name, pairing, entries, reference, calls, ran,
                                           bounds))  # fmt: skip
    return climbed


def _bounds(reference: Trace, port: Port, trial: Trial) -> Bounds:
    if rungs.precision_of(port, reference) == "float64" or not port.isolates:
        return Bounds(reference, port.facts.get("noise"), resolves=port.isolates)
    return Bounds(reference, port.noise(trial.weights, len(reference.about["accumulated"]) or 1))


def _mapping_rung(found: Mapping) -> Stage:
    rung = Stage(number="1", name="mapping")
    for entry in found.entries:
        rung.add("mapping", str(entry.reference), 0.0, 0.0)
    for name in (*found.only_reference, *found.only_port):
        rung.add("mapping", name, math.inf, 0.0)
    return rung
