"""One check: the reference's trace, the port's program, all rungs, the roots."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lockstep.check import accept as acceptance
from lockstep.check import causes, excuses, notes, rungs
from lockstep.check.excuses import Excused, constants
from lockstep.check.following.follow import Followed
from lockstep.check.following.tapes import Asked
from lockstep.check.initial import compare_initial_values
from lockstep.check.layout import Entry, fitting_permutations
from lockstep.check.outputs import Outputs, compare_outputs
from lockstep.check.pairing import by_names
from lockstep.check.pairing.by_values import entries_of
from lockstep.check.pairing.entries import Mapping
from lockstep.check.prove import Prover, Trial
from lockstep.check.roots import backward
from lockstep.check.roots.lines import Follower, name_lines, name_lines_of_batches
from lockstep.check.roots.locate import (
    Root,
    find_initial,
    find_roots,
    list_some,
    root_of_free_run,
)
from lockstep.check.rungs import Bounds, Spot, Stage
from lockstep.check.settle import (
    ECHO,
    FOLLOWS,
    INSIDE,
    Fate,
    complete,
    left_of_accepted,
    may_cause,
    require_settled,
    settle,
)
from lockstep.check.sides.modules import Calls, module_of
from lockstep.check.sides.port import Port, aliases_of, tensors_of
from lockstep.check.sides.trace import Trace
from lockstep.check.written import compare_as_written, compare_dropout
from lockstep.model.params import Arrays
from lockstep.worker import Say, silent
from lockstep_recorder.noise import STATISTICS, is_statistic
from lockstep_recorder.recording import prefixed

FORWARD = "forward pass only (--forward)"
DIFFERENTIATES = (
    "a program differentiates inside its loss: what arrives at a module is not its gradient"
)
TRAINING = (("4i", "update, isolated"), ("4", "update, alone"), ("5", "accumulation"),
            ("8", "loss curves"))  # fmt: skip
ROUNDED = 1e-6  # relative: some ulps of float32


@dataclass
class Result:
    """The findings, roots and notes of a check."""

    verdict: str  # equal, different, incomplete
    rungs: list[Stage]
    roots: list[Root]
    echoes: int
    accepted: list[Root]
    initial: list[Root]  # what `build` draws otherwise, where that is no difference
    beside: list[Root]  # what was mended, or switched off, and a user may want to know
    excused: list[Excused]  # what was mended, with what is left
    mapping: Mapping
    pairs: dict[str, str]  # the port's call -> the reference's
    partnerless: list[str]
    reference: dict[str, Any]
    port: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    uncompared: list[str] = field(default_factory=list)  # state that has no partner
    shuffled: list[str] = field(default_factory=list)  # tensors with rows in another order
    guessed: list[str] = field(default_factory=list)  # tensors that names alone have paired
    undecided: list[str] = field(default_factory=list)  # ... and might have paired otherwise
    crossed: list[str] = field(default_factory=list)  # tensors that values pair against names
    turned: list[str] = field(default_factory=list)  # outputs with their axes in another order
    updates: int = 0  # of the optimizer, that were compared


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
    stages, outputs = measure(reference, port, calls, trial, found, bounds)
    say("all ends compared")
    excused, measured_with = _excuse(stages, reference, port, trial, entries, again)
    partnerless = [r for r in calls.names if r not in trial.pairing.calls.values()]
    tapped = trial.tapped | {call for call, kind in calls.kinds.items() if kind == "tap"}
    as_written, in_evaluation = compare_as_written(reference.about, port.facts, stages["2"])
    known = acceptance.parse(accept or [])
    evidence = causes.Evidence(measured_with, port, calls, trial, entries, prover, again)
    roots, unnamed = list[Root](), list[str]()
    # Below float64 the ends are blunt, and what differs inside by more than noise is sharper.
    exact = rungs.precision_of(port, reference) == "float64"
    open_spots = [spot for stage in stages.values() for spot in stage.spots if spot.rung != "0"]
    if any(spot.is_end or not exact for spot in open_spots) or initial:
        roots = find_roots([*stages.values()], calls, trial.free.calls, partnerless, tapped,
                           {entry.reference.name for entry in entries},
                           _lacking_parameters(found, reference, port))  # fmt: skip
        roots = [root for root in roots if not exact or _shows_in_an_end(root, stages)]
        roots = complete(
            stages.values(), _unmatched(found, stages["1"]) + roots + as_written, calls
        )
        own = [root for root in roots if root not in as_written]
        unnamed = backward.name_and_join(own, measured_with, port, trial,
                                         trial.pairing.forced(calls))  # fmt: skip
        causes.explain(own, evidence)
        roots = own + as_written
        if outputs.unseen:
            unseen = next(spot.detail for spot in stages["6"].spots if spot.detail)
            for root in (root for root in roots if root.direction == "forward"):
                root.hints.insert(0, f"it shows {unseen}, in the model's output alone")
    if initial_spots := stages["0"].spots if not initial else []:
        roots = [root for root in roots if root.direction != "initial values"]
        roots += find_initial(initial_spots, calls)
        causes.explain(roots[-1:], evidence)
    unused = acceptance.say_unused(known, roots)
    accepted = [root for root in roots if acceptance.is_accepted(root, known)]
    drawn = [root for root in roots if root.direction == "initial values" and not initial]
    roots = [root for root in roots if root not in (*accepted, *drawn)]
    lacks = list[str]()
    if accepted and not roots:
        roots, lacks = _judge_beside(accepted, stages, evidence)
        causes.explain(roots, evidence)
    beside = [*constants(reference, port), *(r for each in excused for r in each.beside),
              *in_evaluation]  # fmt: skip
    fates = settle(stages.values(), [*roots, *accepted, *drawn],
                   {spot: each.name for each in excused for spot in each.spots})  # fmt: skip
    require_settled(stages.values(), fates)
    echoes = sum(fate.kind == ECHO for fate in fates.values())
    if not reference.about["repeats"]:  # what differs may be chance
        echoes, roots = sum(len(stage.spots) for stage in stages.values()), []
    compared = reference.about.get("forward") or notes.has_gradients(reference)
    shown = reference.about["repeats"] and compared
    unshown = notes.undetermined(reference, port, trial, found)
    undecided = notes.undecided(unshown, found)
    agrees = "equal" if shown and not undecided else "incomplete"
    verdict = "different" if roots else agrees
    limits = notes.of(reference, port, trial, calls, partnerless, [*stages.values()], entries)
    limits += [each.note for each in excused if each.note]
    limits += _inside(fates, roots) + unused
    if roots:
        rounded = any(root.entry == "made in float32" for root in roots)
        paired = {r for slots in trial.pairing.slots.values() for r in slots.values()}
        by_hand = any(entry.given for entry in entries)
        limits += unnamed + name_lines(roots, follower, rounded, trial.weights, paired, by_hand)
        if again and port.isolates:
            name_lines_of_batches(roots, follower, trial.weights, again)
    if follower.lacks and (found.only_reference or found.only_port):
        limits.append(f"names and shapes alone pair tensors: {follower.lacks}")
    roots = causes.merge_lines(roots)
    guessed = [str(e.reference) for e in unshown]
    if roots and any(spot.rule == "loss" for spot in stages["2"].spots):  # else values prove it
        guessed = notes.guessed(trial, found, follower)
    forward_alone = bool(reference.about.get("forward"))
    uncompared = notes.unmatched_state(reference, trial, entries) if forward_alone else []
    uncompared += notes.untied(entries, [*stages.values()]) + outputs.lacks + lacks
    uncompared += notes.kept_alone(reference, port)
    uncompared += compare_dropout(reference.about, port.facts, calls, trial.free.calls)
    return Result(verdict, [*stages.values()], roots, echoes, accepted, drawn, beside, excused,
                  found, trial.pairing.calls, partnerless, reference.about, port.facts, limits,
                  uncompared, notes.shuffled_tensors(entries), guessed, undecided,
                  notes.crossed(found), outputs.turned,
                  notes.updates_seen(reference, [*stages.values()]))  # fmt: skip


def measure(
    reference: Trace, port: Port, calls: Calls, trial: Trial, found: Mapping, bounds: Bounds
) -> tuple[dict[str, Stage], Outputs]:
    """Measures all rungs, by number: the ends, and what locates them."""
    entries, forward = found.entries, reference.about.get("forward")
    climbed = [compare_initial_values(entries, port, reference), _mapping_rung(found)]
    climbed += _runs(reference, port.facts, calls, trial, entries, bounds)
    later: Arrays = {}
    port.own = {} if forward else _own_gradients(reference, port, trial, entries)
    if forward:
        climbed += [Stage(number=number, name=name, lacks=FORWARD) for number, name in TRAINING]
    else:
        climbed += [rungs.updates(port, reference, entries), rungs.alone(port, reference, entries)]
        rung, later = rungs.accumulation(port, reference, entries, bounds)
        for name in notes.unmatched_state(reference, trial, entries):
            rung.add("state", name, math.inf, 0.0)
        climbed += [rung, rungs.curves(port, reference)]
    stages = {rung.number: rung for rung in climbed}
    outputs = compare_outputs(reference, port, trial, later, bounds)
    stages["6"] = outputs.stage
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


def _excuse(
    stages: dict[str, Stage], reference: Trace, port: Port, trial: Trial, entries: list[Entry],
    again: Callable[[], Asked] | None,
) -> tuple[list[Excused], Trace]:  # fmt: skip
    """Tries each excuse; returns those that mend something, and the trace that the optimizer's
    rungs were measured with."""
    if reference.about.get("forward"):
        return [], reference
    clipped, mended = excuses.clip(stages, reference, port, entries, again)
    found = [clipped, excuses.frozen(stages, entries, port)]
    if rungs.precision_of(port, reference) == "float64" and port.isolates:
        found.append(excuses.cancelling(stages, reference, port, trial, entries))
    return [each for each in found if each], mended


def _shows_in_an_end(root: Root, stages: dict[str, Stage]) -> bool:
    """Says if a root of an isolated rung may cause what differs at an end; what a module ends with
    elsewhere, or where a gradient is stopped, is none of its own."""
    if root.rung not in ("2i", "3i"):
        return True
    ends = (spot for number in ("2", "3", "5", "6") for spot in stages[number].spots if spot.is_end)
    return any(may_cause(root, spot) for spot in ends)


def _judge_beside(
    accepted: list[Root], stages: dict[str, Stage], evidence: causes.Evidence
) -> tuple[list[Root], list[str]]:
    """Judges all else than what is accepted, as if that were mended: fed the reference's values in
    all places, also of later batches.

    Returns:
        Roots, and what is not compared.
    """
    mends = [root for root in accepted if root.direction in ("forward", "backward")
             and any(spot.rule != "state" for spot in root.spots)]  # fmt: skip
    lacks = []
    later: list[Root] = []
    can = evidence.again is not None and evidence.trial.isolated is not None
    if mends and can:
        later = compare_batches(evidence, accepted)
    elif mends:
        lacks.append("batches behind the first, for they follow from what is accepted")
    left = left_of_accepted(stages, accepted, evidence.calls, mended=bool(mends) and can)
    if stages["8"].spots and not any(s.rule == "curve" for root in left for s in root.spots):
        lacks.append("the loss curve, for it follows from what is accepted")
    return later + left, lacks


def compare_batches(evidence: causes.Evidence, accepted: list[Root]) -> list[Root]:
    """Feeds the port the reference's values of each batch; returns the root of what is then wrong
    at other places than those accepted, of a gradient if it is so by more than what follows."""
    reference, port, pairing = evidence.reference, evidence.port, evidence.trial.pairing
    assert evidence.again
    program, spec = evidence.again(), reference.about["batch"]
    weights = prefixed("weights", reference.weights)
    program.ask("widen", weights | prefixed("batch", reference.group("batch/0")), batch=spec)
    places = {spot.where for root in accepted for spot in root.spots}
    figures = [root.largest.figure for root in accepted]
    most = FOLLOWS * max(filter(math.isfinite, figures), default=0.0)
    for step in range(len(reference.about["accumulated"])):
        given = weights | prefixed("batch", reference.group(f"batch/{step}"))
        told, seen = program.ask("run", given, batch=spec)
        calls, bounds = replace(evidence.calls, arrays=seen), Bounds(reference)
        ran = port.run(evidence.trial.weights, forced=pairing.forced(calls), step=step)
        measured = [rungs.activations("2i", "", pairing, calls, ran, told["loss"], bounds, [],
                                      masks=masks) for masks in (True, False)]  # fmt: skip
        gradients = rungs.gradients("3i", "", pairing, evidence.entries,
                                    Trace(reference.about, seen), calls, ran, bounds)  # fmt: skip
        whole = [spot for spot in measured[1].spots if module_of(spot.where) == "(root)"]
        wrong = [spot for spot in [*measured[0].spots, *whole] if spot.where not in places]
        wrong += [spot for spot in gradients.spots if not spot.figure <= most]
        if wrong:
            batch = f"{rungs.BATCH}{step}"
            spot = replace(wrong[0], where=batch, rule="loss")
            root = root_of_free_run(spot, "accumulation")
            root.hints.append(f"fed the reference's values, {wrong[0].where} differs")
            return [root]
    return []


def _inside(fates: dict[Spot, Fate], roots: list[Root]) -> list[str]:
    """Notes what differs between the ends, where no end does."""
    inside = [spot for spot, fate in fates.items() if fate.kind == INSIDE and spot.rung != "0"]
    if roots or not inside:
        return []
    return [f"{len(inside)} values inside differ, such as {inside[0].where}, and no end does: a "
            "module ends elsewhere, or a gradient is stopped elsewhere"]  # fmt: skip


def calls_of(reference: Trace) -> Calls:
    about = reference.about
    return Calls(about["events"], about["kinds"], reference.arrays, aliases_of(about["tied"]))


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
    if not overrides:
        prover.exchange_lookalikes()
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
        port.first = port.run(port.initial)
    calls = port.first.calls
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
    state = rungs.changed_state(reference.group("state"), reference.weights)
    every = port.initial, reference.weights
    for only, known, side in zip((found.only_port, found.only_reference), parameters, every):
        only[:] = [name for name in only if name in known or is_statistic(name, side)]
    for entry in list(found.entries):
        name = entry.port.name
        if name in parameters[0] or is_statistic(name, port.initial) or entry.given:
            continue
        if entry.reference.name in state:
            continue
        ours = entry.to_reference(entry.port.take(port.initial))
        if not np.allclose(ours, entry.reference.take(reference.weights), rtol=ROUNDED, atol=0):
            found.entries.remove(entry)
            found.notes.append(f"the buffers {entry.port} and {entry.reference} have other values: "
                               "each side keeps its own; --map pairs them")  # fmt: skip


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


def _lacking_parameters(found: Mapping, reference: Trace, port: Port) -> list[str]:
    """Lists the parameters without a partner: the norm that gradients are clipped by has theirs."""
    sides = (found.only_reference, reference.about), (found.only_port, port.facts)
    return [name for only, about in sides for name in only if name in about["parameters"]]


def _unmatched(found: Mapping, rung: Stage) -> list[Root]:
    """Makes a root for each side that has tensors alone; their shapes are said."""
    roots = []
    both = bool(found.only_reference and found.only_port)
    for at, (side, names) in enumerate((("reference", found.only_reference),
                                        ("port", found.only_port))):  # fmt: skip
        if names:
            spots = [spot for spot in rung.spots if spot.where in names]
            shapes = [f"{name} {found.sides[at].shapes[name]}" for name in names]
            root = Root("1", list_some(names), "mapping", spots, names, spots[0])
            root.entry = "mapping"
            others, own = found.sides[1 - at].shapes, found.sides[at].shapes
            left = (found.only_port, found.only_reference)[at]
            fits = any(fitting_permutations(own[a], others[b]) for a in names for b in left)
            why = ("others fit by their shape, and neither values nor names pair them" if fits
                   else "nothing on the other side fits them")  # fmt: skip
            root.cause = f"tensors of the {side} alone: {why}: {list_some(shapes)}"
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
