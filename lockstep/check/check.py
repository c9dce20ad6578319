"""One check: the reference's trace, the port's program, all rungs, the roots."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lockstep.check import accept as acceptance
from lockstep.check import causes, notes, rungs
from lockstep.check.following.follow import Followed
from lockstep.check.following.tapes import Asked
from lockstep.check.initial import compare_initial_values
from lockstep.check.layout import Entry
from lockstep.check.pairing import by_names
from lockstep.check.pairing.by_values import entries_of
from lockstep.check.pairing.entries import Mapping
from lockstep.check.prove import Prover, Trial
from lockstep.check.roots import backward, locate
from lockstep.check.roots.lines import Follower, name_lines, name_lines_of_batches
from lockstep.check.rungs import Bounds, Spot, Stage
from lockstep.check.sides.modules import Calls, module_of
from lockstep.check.sides.port import Port, aliases_of, tensors_of
from lockstep.check.sides.trace import Trace
from lockstep.check.written import compare_as_written
from lockstep.judge.compare import norm_gap
from lockstep.judge.verdict import Finding
from lockstep.worker import Say, silent
from lockstep_recorder.noise import STATISTICS, is_statistic

FORWARD = "forward pass only (--forward)"
INSIDE = "a program differentiates inside its loss: what arrives at a module is not its gradient"
TRAINING = (("4i", "update, isolated"), ("4", "update, alone"), ("5", "accumulation"),
            ("8", "loss curves"))  # fmt: skip
ROUNDED = 1e-6  # relative: some ulps of float32


@dataclass
class Result:
    """The findings, roots and notes of a check."""

    verdict: str  # equal, different, incomplete
    rungs: list[Stage]
    roots: list[locate.Root]
    echoes: int
    accepted: list[locate.Root]
    initial: list[locate.Root]  # what `build` draws otherwise, where that is no difference
    beside: list[locate.Root]  # of a format or a library, and no fault of the port
    mapping: Mapping
    pairs: dict[str, str]  # the port's call -> the reference's
    partnerless: list[str]
    reference: dict[str, Any]
    port: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    uncompared: list[str] = field(default_factory=list)  # state that has no partner
    shuffled: list[str] = field(default_factory=list)  # tensors with rows in another order


def run(
    reference: Trace, port: Port, *, overrides: dict[str, Any] | None = None,
    accept: list[str] | None = None, initial: bool = False, say: Say = silent,
    again: Callable[[], Asked] | None = None,
) -> Result:  # fmt: skip
    """Climbs every rung that the two programs allow.

    Args:
        initial: initial values that differ are a difference, and no report of their own.
        again: starts the reference's program once more, to change it for a cause.
    """
    calls = calls_of(reference)
    follower = Follower(reference, port, say)
    prover = pair_tensors(reference, port, overrides or {}, follower)
    trial, found = prover.best, prover.mapping
    say(f"mapping: {len(found.entries)} pieces; {len(found.only_reference)} tensors of the "
        f"reference and {len(found.only_port)} of the port without a partner")  # fmt: skip
    entries = found.entries
    say(f"modules: {len(trial.pairing.calls)} calls paired of {len(calls.names)} in the reference")
    bounds = _bounds(reference, port, trial)
    climbed = [compare_initial_values(entries, port, reference), _mapping_rung(found)]
    climbed += _runs(reference, port.facts, calls, trial, entries, bounds)
    say("activations and gradients compared")
    if reference.about.get("forward"):
        climbed += [Stage(number=number, name=name, lacks=FORWARD) for number, name in TRAINING]
    else:
        climbed += [rungs.updates(port, reference, entries), rungs.alone(port, reference, entries),
                    rungs.accumulation(port, reference, entries, bounds),
                    rungs.curves(port, reference)]  # fmt: skip
    exact = bounds.exact and port.isolates
    cancelling = rungs.allow_cancelling(climbed, port, trial.weights) if exact else []
    partnerless = [r for r in calls.names if r not in trial.pairing.calls.values()]
    by_number = {rung.number: rung for rung in climbed}
    elsewhere = _frozen_otherwise(by_number, reference) + _stopped_elsewhere(by_number)
    tapped = trial.tapped | {call for call, kind in calls.kinds.items() if kind == "tap"}
    roots, echoes = locate.find_roots(climbed, calls, trial.free.calls, partnerless, tapped,
                                     {entry.reference.name for entry in entries},
                                     _lacking_parameters(found, reference, port))  # fmt: skip
    roots = _unmatched(found, climbed[1]) + roots
    unnamed = backward.name_and_join(roots, reference, port, trial, trial.pairing.forced(calls))
    evidence = causes.Evidence(reference, port, calls, trial, entries, prover, again)
    found_before = sum(len(root.spots) for root in roots)
    causes.explain(roots, evidence)
    echoes += found_before - sum(len(root.spots) for root in roots)
    roots += compare_as_written(reference.about, port.facts, climbed[2])
    found_all = list(roots)
    known = acceptance.parse(accept or [])
    unused = acceptance.say_unused(known, roots)
    accepted = [root for root in roots if acceptance.is_accepted(root, known)]
    roots = [root for root in roots if root not in accepted]
    if not reference.about["repeats"]:  # what differs may be chance
        echoes, roots = sum(len(rung.spots) for rung in climbed), []
    drawn = [root for root in roots if root.direction == "initial values" and not initial]
    beside = [root for root in roots if causes.is_no_fault(root, evidence)]
    roots = [root for root in roots if root not in (*drawn, *beside)]
    if beside and not roots:
        roots = locate.find_hidden(climbed, [*beside, *accepted], calls)
        causes.explain(roots, evidence)
        echoes -= sum(len(root.spots) for root in roots)
    shown = reference.about["repeats"] and (
        reference.about.get("forward") or notes.has_gradients(reference)
    )
    rounded = any(root.entry == "made in float32" for root in found_all)
    verdict = "different" if roots else "equal" if shown else "incomplete"
    limits = notes.of(reference, port, trial, calls, partnerless, climbed, accepted, entries)
    limits += elsewhere + cancelling
    limits += unused
    if roots:
        paired = {r for slots in trial.pairing.slots.values() for r in slots.values()}
        by_hand = any(entry.given for entry in entries)
        limits += unnamed + name_lines(found_all, follower, rounded, trial.weights, paired, by_hand)
        if again and port.isolates:
            name_lines_of_batches(roots, follower, trial.weights, again)
    if follower.lacks and (found.only_reference or found.only_port):
        limits.append(f"names and shapes alone pair tensors: {follower.lacks}")
    roots = causes.merge_lines(roots)
    uncompared = notes.unmatched_state(reference, trial, entries) + notes.untied(entries, climbed)
    return Result(verdict, climbed, roots, echoes, accepted, drawn, beside, found,
                  trial.pairing.calls, partnerless, reference.about, port.facts, limits,
                  uncompared, notes.shuffled_tensors(entries))  # fmt: skip


def calls_of(reference: Trace) -> Calls:
    about = reference.about
    return Calls(about["events"], about["kinds"], reference.arrays, aliases_of(about["tied"]))


def _runs(
    reference: Trace, facts: dict[str, Any], calls: Calls, trial: Trial, entries: list[Entry],
    bounds: Bounds,
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
                              rungs.states(entries, ran.state, trial.weights, reference))
        )  # fmt: skip
        number, name = f"3{suffix}", f"gradients{word}"
        if reference.about.get("forward"):
            climbed.append(Stage(number=number, name=name, lacks=FORWARD))
        elif suffix and inside:
            climbed.append(Stage(number=number, name=name, lacks=INSIDE))
        else:
            climbed.append(rungs.gradients(number, name, pairing, entries, reference, calls, ran,
                                           bounds))  # fmt: skip
    return climbed


def _frozen_otherwise(rungs_of: dict[str, Stage], reference: Trace) -> list[str]:
    """Finds gradients that one side alone has, of tensors that neither side's optimizer moves: one
    freezes them in the model, such as by `requires_grad`, and the other in the optimizer.

    Fed the reference's gradients, which are zero, any optimizer leaves a tensor as it is: the loss
    curves have to be equal, too.
    """
    moved = [rungs_of["4"], rungs_of["4i"]]
    if any(rung.lacks for rung in (*moved, rungs_of["8"])) or rungs_of["8"].spots:
        return []
    still = {name for name, x in reference.group("varied").items() if not x.any()}
    still -= {spot.detail for rung in moved for spot in rung.spots}

    def is_frozen(spot: Finding) -> bool:
        if not isinstance(spot, Spot) or spot.rule != "gradient" or spot.ours is None:
            return False
        one_side = spot.theirs is not None and spot.ours.any() != spot.theirs.any()
        return one_side and spot.where.partition("[")[0] in still

    tensors = set[str]()
    for rung in (rungs_of[number] for number in ("3", "3i", "5")):
        tensors |= {spot.where.partition("[")[0] for spot in rung.findings if is_frozen(spot)}
        rung.findings = [spot for spot in rung.findings if not is_frozen(spot)]
    said = f"{locate.list_some(sorted(tensors))}: one side alone has a gradient, and neither "
    return [f"{said}optimizer moves them"] if tensors else []


def _stopped_elsewhere(rungs_of: dict[str, Stage]) -> list[str]:
    """Finds a gradient that one side stops in a module and the other behind it, such as of padding:
    where each parameter's is right, no other that arrives anywhere is a difference. Where anything
    else is wrong, none is of a tensor whose part that differs gets none when the port runs alone,
    and none that arrives at what holds this tensor."""
    isolated, free = rungs_of["3i"], rungs_of["3"]
    whole = [rungs_of[number] for number in ("2", "2i", "3", "5")]
    stopped = isolated.spots
    if any(rung.lacks or rung.spots for rung in whole):
        alone = {spot.where: spot for spot in free.spots}
        of_tensors = [s for s in stopped if not free.lacks and _is_stopped_behind(s, alone)]
        holders = {spot.where.partition("[")[0].rpartition(".")[0] for spot in of_tensors}
        stopped = [spot for spot in stopped if spot in of_tensors
                   or (spot.rule == "cotangent" and module_of(spot.where) in holders)]  # fmt: skip
    if not stopped:
        return []
    note = (f"another gradient at {len(stopped)} places, such as {stopped[0].where}, changes none "
            "of a parameter: it is stopped at another place")  # fmt: skip
    isolated.findings = [found for found in isolated.findings if found not in stopped]
    return [note]


def _is_stopped_behind(spot: Spot, alone: dict[str, Spot]) -> bool:
    """Says if a tensor's gradient differs in no more than a part that gets none, in the reference
    and in a port that is not fed the reference's gradients.

    Args:
        alone: by name: a gradient of such a port that is not the reference's.
    """
    if spot.rule != "gradient" or spot.ours is None or spot.theirs is None:
        return False
    none = spot.theirs == 0
    if spot.where in alone:
        none &= alone[spot.where].ours == 0
    return bool(none.any() and norm_gap(spot.ours[~none], spot.theirs[~none]) <= spot.bound)


def pair_tensors(
    reference: Trace, port: Port, overrides: dict[str, Any], follower: Follower
) -> Prover:
    """Guesses by names which tensor is which, stacked and fused ones last; where anything is then
    wrong, follows the data. What that leaves open on both sides, names and shapes may pair."""
    made = port.mapping = propose(reference, port, overrides)
    prover = Prover(port, reference, calls_of(reference))
    prover.search()
    if not (prover.best.wrong or made.only_reference or made.only_port):
        return prover
    for joined in ("blocks", "turns") if made.left_over and port.isolates else ():
        if prover.take_if_right(propose(reference, port, overrides, joined=joined)):
            return prover
    if found := follower.found:
        prover.try_other(propose(reference, port, overrides, found))
    for known in (found, None) if found else (None,):
        if made.left_over or not found:
            prover.try_other(propose(reference, port, overrides, known, joined="blocks"))
    return prover


def propose(
    reference: Trace, port: Port, overrides: dict[str, Any], found: Followed | None = None,
    *, joined: str = "",
) -> Mapping:  # fmt: skip
    """Pairs tensors by what is given, by values, by names and shapes, in this order.

    A first run of the port on its own weights tells the order of its calls.

    Args:
        found: what following the data has paired.
        joined: see `mapping.propose`.
    """
    if port.first is None:
        port.first = port.run(port.initial).calls
    calls = port.first
    theirs = tensors_of(reference.about, reference.weights, reference.about["events"],
                        reference.about["kinds"])  # fmt: skip
    ours = tensors_of(port.facts, port.initial, calls.events, calls.kinds)
    entries = entries_of(found, theirs, ours) if found else []
    made = by_names.propose(theirs, ours, overrides, entries, joined=joined)
    _drop_constants(made, reference, port)
    return made


def _drop_constants(found: Mapping, reference: Trace, port: Port) -> None:
    """Drops buffers that are constants: they need no partner, a port computes them. Running
    statistics, and what the reference's forward pass changes, are state.

    A port keeps its own, for a wrong one is a bug; but what is the reference's, rounded to float32.
    """
    parameters = set(port.facts["parameters"]), set(reference.about["parameters"])
    every = port.initial, reference.weights
    for only, known, side in zip((found.only_port, found.only_reference), parameters, every):
        only[:] = [name for name in only if name in known or is_statistic(name, side)]
    state = rungs.changed_state(reference.group("state"), reference.weights)
    for entry in list(found.entries):
        name = entry.port.name
        if name in parameters[0] or is_statistic(name, port.initial) or entry.given:
            continue
        if entry.reference.name in state:
            continue
        ours = entry.to_reference(entry.port.take(port.initial))
        if not norm_gap(ours, entry.reference.take(reference.weights)) <= ROUNDED:
            found.entries.remove(entry)
            found.notes.append(f"the buffers {entry.port} and {entry.reference} have other values: "
                               "each side keeps its own; --map pairs them")  # fmt: skip


def _bounds(reference: Trace, port: Port, trial: Trial) -> Bounds:
    if rungs.precision_of(port, reference) == "float64" or not port.isolates:
        return Bounds(reference, port.facts.get("noise"))
    return Bounds(reference, port.noise(trial.weights, len(reference.about["accumulated"]) or 1))


def _mapping_rung(found: Mapping) -> Stage:
    rung = Stage(number="1", name="mapping")
    for entry in found.entries:
        rung.add("mapping", str(entry.reference), 0.0, 0.0)
    for name in (*found.only_reference, *found.only_port):
        rung.add("mapping", name, math.inf, 0.0)
    return rung


def _lacking_parameters(found: Mapping, reference: Trace, port: Port) -> list[str]:
    """Lists the parameters without a partner: the norm that gradients are clipped by has theirs."""
    sides = (found.only_reference, reference.about), (found.only_port, port.facts)
    return [name for only, about in sides for name in only if name in about["parameters"]]


def _unmatched(found: Mapping, rung: Stage) -> list[locate.Root]:
    """Makes a root for each side that has tensors alone; their shapes are said."""
    roots = []
    both = bool(found.only_reference and found.only_port)
    for at, (side, names) in enumerate((("reference", found.only_reference),
                                        ("port", found.only_port))):  # fmt: skip
        if names:
            spots = [spot for spot in rung.spots if spot.where in names]
            shapes = [f"{name} {found.sides[at].shapes[name]}" for name in names]
            root = locate.Root("1", locate.list_some(names), "mapping", spots, names, spots[0])
            root.entry = "mapping"
            root.cause = (f"tensors of the {side} alone: nothing on the other side fits them: "
                          f"{locate.list_some(shapes)}")  # fmt: skip
            kept = side == "port" and [name for name in names if STATISTICS.search(name)]
            root.remedy = (
                f"{', '.join(kept)}: running statistics are no parameters: give them as a "
                "collection of their own, as Linen does"
                if kept
                else _remedy(side, both)
            )
            roots.append(root)
    return roots


def _remedy(side: str, both: bool) -> str:
    if both:
        return "give both sides' tensors one shape, or pair them by hand: --map MAP"
    change = "add them to the port" if side == "reference" else "take them out of the port"
    return f"{change}, or pair them by hand: --map MAP"
