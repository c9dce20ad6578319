"""Notes on what limits a verdict, a line each."""

from typing import Any

import numpy as np

from lockstep.check.layout import Entry
from lockstep.check.locate import Root
from lockstep.check.port import Port
from lockstep.check.prove import Trial
from lockstep.check.rungs import Stage, labels_of
from lockstep.check.trace import Trace

FREE = ("2", "3", "5", "8")


def of(
    reference: Trace, port: Port, trial: Trial, partnerless: list[str], climbed: list[Stage],
    accepted: list[Root],
) -> list[str]:  # fmt: skip
    sides = {"reference": reference.about, "port": port.facts}
    found = [note for side, about in sides.items() for note in _precision(side, about)]
    found += [f"the recorder's hooks change gradients of the {side}, such as that of "
              f"{about['hooked'][0]}: the free rungs compare those of a run without hooks"
              for side, about in sides.items() if about.get("hooked")]  # fmt: skip
    calls, pairing = trial.free.calls, trial.pairing
    if not pairing.calls and not calls.names:
        found.append("no module of the port was paired: it shows none; a port in plain JAX shows "
                     "its values through taps(tap)")  # fmt: skip
    elif not pairing.calls:
        found.append(
            "no module of the port was paired: its outputs have other sizes than the reference's"
        )
    elif partnerless:
        total = len(partnerless) + len(pairing.calls)
        found.append(f"{len(partnerless)} of the reference's {total} calls have no partner, such "
                     f"as {partnerless[0]}: they are compared by what follows them")  # fmt: skip
    if pairing.reordered:
        found.append(f"{len(pairing.reordered)} values have their axes in another order, such as "
                     f"{pairing.reordered[0]}: compared in the reference's")  # fmt: skip
    masked = sorted({call for rung in climbed for call in rung.masked})
    if masked:
        found.append(f"{len(masked)} calls differ only at positions that reach no loss, such as "
                     f"{masked[0]}: padding")  # fmt: skip
    if not has_gradients(reference):
        found.append("all of the reference's gradients are zero, which shows nothing of what makes "
                     "or uses them: let its loss depend on its weights")  # fmt: skip
    found += _updates(reference, climbed)
    if accepted and any(rung.spots for rung in climbed if rung.number in FREE):
        found.append("what is accepted is not undone: rungs 2, 3, 5, 8 show what follows from it")
    return found


def _updates(reference: Trace, climbed: list[Stage]) -> list[str]:
    """How far an optimizer was seen, and what its `update` keeps besides."""
    found = []
    rungs = {rung.number: rung for rung in climbed}
    if not rungs["4i"].lacks:
        steps = len(reference.about.get("losses", []))
        fed = max(labels_of(reference).values())
        found.append(f"the optimizer was seen for {fed} updates, and for {steps} in the loss "
                     "curves: what a schedule does later is not compared (--steps)")  # fmt: skip
    if kept := reference.about.get("kept", []):
        found.append(f"update keeps {', '.join(kept[:4])}, which is not compared")
    return found


def unmatched_state(reference: Trace, trial: Trial, entries: list[Entry]) -> list[str]:
    """The state that the forward pass changes and that has no partner: compared with nothing."""
    sides = (
        (reference.group("state"), reference.weights, {e.reference.name for e in entries}),
        (trial.free.state, trial.weights, {e.port.name for e in entries}),
    )
    return [
        f"{side}'s {name}"
        for side, (after, before, paired) in zip(("reference", "port"), sides)
        for name, x in after.items()
        if name not in paired and name in before and not np.array_equal(x, before[name])
    ]


def has_gradients(reference: Trace) -> bool:
    """Says if any gradient of the recorded program is not zero."""
    return any(np.any(x) for x in reference.group("grad").values())


def _precision(side: str, about: dict[str, Any]) -> list[str]:
    if about["precision"] != "float64":
        why = ", ".join(map(str, about["narrow"][:3]))
        return [f"the {side} runs in {about['precision']} alone: blind below its noise ({why})"]
    if about["widened"]:
        return [f"the {side} casts to narrower floats inside: here these mean float64"]
    return []
