"""Causes, computed: an entry of the catalogue is named only if the gap falls to rounding with it.

Each solver gets what both programs computed from the same operands, and looks for one formula that
gives the reference's value and another that gives the port's. Both must fit to rounding.
"""

from contextlib import suppress

import numpy as np

from lockstep.check import names
from lockstep.check.causes import (
    attention,
    backward,
    glue,
    initial,
    loss,
    modules,
    optimizer,
    statistics,
)
from lockstep.check.causes.evidence import Cause, scenes_of
from lockstep.check.causes.evidence import Evidence as Evidence
from lockstep.check.roots.locate import Root
from lockstep.check.rungs import Spot
from lockstep.check.sides.modules import call_of, module_of

FORWARD = (glue.rounding, modules.norm, modules.linear, glue.activation, glue.combination,
           glue.reduction, attention.attention, glue.rearranged, glue.scaled)  # fmt: skip


def explain(roots: list[Root], evidence: Evidence) -> None:
    """Writes cause and remedy into the roots for which one is found."""
    for root in roots:
        found = None
        # A module of another shape than a solver expects has no cause; the verdict stands.
        with suppress(ValueError, IndexError, np.linalg.LinAlgError):
            found = _cause_of(root, evidence)
        if found:
            root.put_cause(found)
    _hint_at_untied(roots, evidence)
    for root in roots:
        if root.cause or root.direction != "forward" or root.further:
            continue
        found = _exchanged(root, evidence)
        if found:
            root.put_cause(found)
    for root in roots:
        if root.cause and root.direction in ("forward", "accumulation"):
            root.hints = []
    roots[:] = merge_alike(roots)
    for root in [*_echoes(roots), *_echoes_in_state(roots, evidence)]:
        roots.remove(root)


def _hint_at_untied(roots: list[Root], evidence: Evidence) -> None:
    """Names tensors of the port that stand for one of the reference, to updates without a cause."""
    own = [f"{e.port} (there {e.alias}, tied)" for e in evidence.entries if e.alias]
    for root in roots:
        if own and root.direction == "update" and not root.cause:
            root.hints.insert(0, f"the port has a tensor of its own for {', '.join(own)}")


def _exchanged(root: Root, evidence: Evidence) -> Cause | None:
    """Finds a square kernel that is used turned, or two tensors in each other's place, such as the
    gains of query and key."""
    spot = root.spots[0]
    inside = spot.where if spot.rule == "output" else evidence.calls.parents().get(spot.where, "")
    place = names.wildcard(inside.partition("#")[0])
    if turned := evidence.prover.find_turned(place):
        return Cause("linear layer", f"{turned} is used with its axes exchanged", f"turn {turned}")
    found = evidence.prover.find_exchange(place)
    if not found:
        return None
    return Cause("exchanged tensors", f"{found} are used in each other's place",
                 f"exchange {found}; if their names alone are exchanged: --map")  # fmt: skip


def merge_alike(roots: list[Root]) -> list[Root]:
    """Joins roots that have one cause in several places, such as the epsilon of all norms."""
    merged: dict[tuple[str, ...], Root] = {}
    for root in roots:
        key = (root.rung, root.direction, root.cause or root.where)
        if key not in merged:
            merged[key] = root
        else:
            merged[key] = merged[key].joined_with(root)
    return list(merged.values())


def _echoes(roots: list[Root]) -> list[Root]:
    """Finds gradients that come out right, too, with a change that mends the forward pass."""
    forward = {(root.entry, root.remedy) for root in roots if root.direction == "forward"}
    return [root for root in roots if root.direction == "backward"
            and root.cause and (root.entry, root.remedy) in forward]  # fmt: skip


def _echoes_in_state(roots: list[Root], evidence: Evidence) -> list[Root]:
    """Finds state that is made of a value which is wrong already: of a module that is not fed the
    reference's values, before the end of a place where the forward pass is wrong."""
    calls, pairing = evidence.calls, evidence.trial.pairing
    fed = {module_of(call_of(r)) for slots in pairing.slots.values() for r in slots.values()
           if r.startswith("in/")}  # fmt: skip
    ended = {call: at for at, call in enumerate(calls.names)} | {"loss": len(calls.names)}
    last = max((ended.get(spot.where, 0) for root in roots for spot in root.spots
                if root.direction == "forward" and spot.rule != "state"
                and root.entry not in loss.ENTRIES), default=-1)  # fmt: skip
    held = {module_of(call): ended[call] for call in calls.names}

    def follows(spot: Spot) -> bool:
        holder = spot.where.partition("[")[0].rpartition(".")[0]
        return spot.rule == "state" and holder not in fed and held.get(holder, 0) <= last

    return [root for root in roots if root.direction == "forward" and not root.cause
            and all(map(follows, root.spots))]  # fmt: skip


def merge_lines(roots: list[Root]) -> list[Root]:
    """Joins roots of one line of the port, such as that of a helper that several modules call,
    unless they have different kinds of causes."""
    merged: dict[tuple[str, str, str], Root] = {}
    for number, root in enumerate(roots):
        line = root.lines[1] if root.lines else str(number)
        key = (root.rung, root.direction, line)
        former = merged.get(key)
        if former and (not root.cause or not former.cause or root.entry == former.entry):
            merged[key] = former.joined_with(root)
        else:
            merged[key if former is None else (*key[:2], str(number))] = root
    return list(merged.values())


def _cause_of(root: Root, evidence: Evidence) -> Cause | None:
    if root.further:
        return None
    if root.direction == "update":
        return optimizer.explain(root, evidence)
    if root.direction == "initial values":
        return initial.explain(root, evidence)
    if root.direction == "backward":
        return backward.explain(root, evidence)
    if root.direction == "accumulation":
        return statistics.explain_carried(root, evidence)
    if root.direction != "forward":
        return None
    if root.largest.rule == "loss":
        return loss.explain(evidence)
    if root.largest.rule == "state":
        return statistics.explain(root.spots[0], evidence)
    for scene in scenes_of(root.spots[0], evidence):
        for solver in FORWARD if scene.last is None else (glue.activation, attention.attention):
            if found := solver(scene):
                return found
    return None
