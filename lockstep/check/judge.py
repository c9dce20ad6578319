"""Judges what differs at the ends: its roots, what a user accepts, and a fate for each finding."""

import math
from dataclasses import dataclass, replace

from lockstep.check import accept as acceptance
from lockstep.check import causes, rungs
from lockstep.check.align import Alignment
from lockstep.check.ends import Ends
from lockstep.check.excuses import constants
from lockstep.check.initial import compare_built
from lockstep.check.layout import fitting_permutations
from lockstep.check.pairing.entries import Mapping
from lockstep.check.roots import backward
from lockstep.check.roots.lines import find_partings
from lockstep.check.roots.locate import (
    Root,
    find_initial,
    find_roots,
    list_some,
    root_of_free_run,
)
from lockstep.check.rungs import Bounds, Spot, Stage
from lockstep.check.settle import (
    FOLLOWS,
    Fate,
    complete,
    left_of_accepted,
    may_cause,
    require_settled,
    settle,
)
from lockstep.check.sides.modules import module_of
from lockstep.check.sides.trace import Trace
from lockstep.check.written import compare_as_written, compare_whole_numbers
from lockstep_recorder.noise import STATISTICS
from lockstep_recorder.recording import prefixed


@dataclass(frozen=True)
class Judgement:
    """Holds the roots of a verdict, and what stands beside them.

    Attributes:
        roots: of what differs; none where the port is right.
        accepted: roots that the user accepts.
        drawn: what `build` draws otherwise, where that is no difference.
        beside: what was mended or switched off, and a user may want to know.
        fates: what became of each finding.
        uncompared: what could not be compared beside what is accepted.
        unnamed: why roots have no lines, a note each.
        unused: what the user accepts and no root needs, a note each.
    """

    roots: list[Root]
    accepted: list[Root]
    drawn: list[Root]
    beside: list[Root]
    fates: dict[Spot, Fate]
    uncompared: list[str]
    unnamed: list[str]
    unused: list[str]


def judge(aligned: Alignment, ends: Ends, accept: list[str], *, initial: bool) -> Judgement:
    """Finds the roots of what differs, and what became of each finding.

    Args:
        accept: as `--accept` gives it.
        initial: initial values that differ are a difference, and no report of their own.
    """
    evidence = causes.Evidence(ends.reference, aligned.port, aligned.calls, aligned.trial,
                               aligned.entries, aligned.prover, aligned.again)  # fmt: skip
    as_written, in_evaluation = compare_as_written(
        aligned.reference.about, aligned.port.facts, ends.stages["2"]
    )
    if not aligned.reference.about.get("forward"):
        as_written += compare_whole_numbers(
            aligned.reference.about, aligned.port.limits(), ends.stages["2"]
        )
    uncompared = list[str]()
    if initial:
        uncompared += compare_built(ends.stages["0"], aligned.entries, aligned.port,
                                    aligned.reference, aligned.again)  # fmt: skip
    roots, unnamed = _roots(aligned, ends, evidence, as_written, initial=initial)
    if not initial and ends.stages["0"].spots:
        roots = [root for root in roots if root.direction != "initial values"]
        roots += find_initial(ends.stages["0"].spots, aligned.calls)
        causes.explain(roots[-1:], evidence)
    known = acceptance.parse(accept)
    unused = acceptance.say_unused(known, roots)
    accepted = [root for root in roots if acceptance.is_accepted(root, known)]
    drawn = [root for root in roots if root.direction == "initial values" and not initial]
    roots = [root for root in roots if root not in (*accepted, *drawn)]
    if accepted and not roots:
        roots, lacks = _judge_beside(accepted, ends.stages, evidence)
        uncompared += lacks
        causes.explain(roots, evidence)
    beside = [*constants(aligned.reference, aligned.port),
              *(root for each in ends.excused for root in each.beside), *in_evaluation]  # fmt: skip
    excused = {spot: each.name for each in ends.excused for spot in each.spots}
    fates = settle(ends.stages.values(), [*roots, *accepted, *drawn], excused)
    require_settled(ends.stages.values(), fates)
    return Judgement(roots, accepted, drawn, beside, fates, uncompared, unnamed, unused)


def _roots(
    aligned: Alignment, ends: Ends, evidence: causes.Evidence, as_written: list[Root], *,
    initial: bool,
) -> tuple[list[Root], list[str]]:  # fmt: skip
    """Finds the roots of all ends that differ, their causes, and notes on those without lines."""
    # Below float64 the ends are blunt, and what differs inside by more than noise is sharper.
    exact, trial, stages = aligned.is_exact, aligned.trial, ends.stages
    if not (initial or any(spot.is_end or not exact for spot in ends.spots)):
        return [], []
    roots = find_roots([*stages.values()], aligned.calls, trial.free.calls, aligned.partnerless,
                       aligned.tapped, {entry.reference.name for entry in aligned.entries},
                       _lacking_parameters(aligned))  # fmt: skip
    roots = [root for root in roots if not exact or _shows_in_an_end(root, stages)]
    roots, unfollowed = find_partings(roots, aligned)
    unmatched = _unmatched(aligned.mapping, stages["1"])
    roots = complete(stages.values(), unmatched + roots + as_written, aligned.calls)
    own = [root for root in roots if root not in as_written]
    unnamed = [unfollowed] * bool(unfollowed)
    unnamed += backward.name_and_join(own, ends.reference, aligned.port, trial,
                                     trial.pairing.forced(aligned.calls))  # fmt: skip
    causes.explain(own, evidence)
    if ends.outputs.unseen:
        unseen = next(spot.detail for spot in stages["6"].spots if spot.detail)
        for root in (root for root in own + as_written if root.direction == "forward"):
            root.hints.insert(0, f"it shows {unseen}, in the model's output alone")
    return own + as_written, unnamed


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
    states = {spot.where for root in accepted for spot in root.spots if spot.rule == "state"}
    behind = (spot for stage in stages.values() if stage.number != "2" for spot in stage.spots)
    followed = {spot.where for spot in behind if spot.rule == "state" and spot.where in states}
    followed -= {spot.where for root in left for spot in root.spots}
    lacks += [f"what later batches leave in {name}, for it follows from what is accepted"
              for name in sorted(followed)]  # fmt: skip
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
        differing = [*measured[0].spots, *whole]
        wrong = [s for s in differing if s.where not in places or not s.figure <= most]
        wrong += [spot for spot in gradients.spots if not spot.figure <= most]
        if wrong:
            batch = f"{rungs.BATCH}{step}"
            spot = replace(wrong[0], where=batch, rule="loss")
            root = root_of_free_run(spot, "accumulation")
            root.hints.append(f"fed the reference's values, {wrong[0].where} differs")
            return [root]
    return []


def _lacking_parameters(aligned: Alignment) -> list[str]:
    """Lists the parameters without a partner: the norm that gradients are clipped by has theirs."""
    mapping = aligned.mapping
    sides = (
        (mapping.only_reference, aligned.reference.about),
        (mapping.only_port, aligned.port.facts),
    )
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
