"""One check: both programs are aligned, their ends compared and judged, and a verdict given."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lockstep.check import causes, notes
from lockstep.check.align import Alignment, align
from lockstep.check.ends import Ends, compare_ends
from lockstep.check.excuses import Excused
from lockstep.check.following.tapes import Asked
from lockstep.check.judge import Judgement, judge
from lockstep.check.pairing.entries import Mapping
from lockstep.check.roots.lines import name_lines, name_lines_of_batches
from lockstep.check.roots.locate import Root
from lockstep.check.rungs import Spot, Stage
from lockstep.check.settle import ECHO, INSIDE, Fate
from lockstep.check.sides.port import Port
from lockstep.check.sides.trace import Trace
from lockstep.check.written import compare_dropout
from lockstep.worker import Say, silent


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
    paired_outputs: list[str] = field(default_factory=list)  # that values or sizes alone pair
    updates: int = 0  # of the optimizer, that were compared
    batches: int = 1  # of which losses, gradients and outputs were compared


def run(
    reference: Trace, port: Port, *, overrides: dict[str, Any] | None = None,
    accept: list[str] | None = None, initial: bool = False, say: Say = silent,
    again: Callable[[], Asked] | None = None,
) -> Result:  # fmt: skip
    """Climbs every rung that the two programs allow.

    Args:
        overrides: the mapping, or a part of it, by hand.
        accept: known differences, as `--accept` gives them.
        initial: initial values that differ are a difference, and no report of their own.
        again: starts the reference's program once more, to change it for a cause.
    """
    aligned = align(reference, port, overrides or {}, say, again)
    ends = compare_ends(aligned)
    say("all ends compared")
    return conclude(aligned, ends, judge(aligned, ends, accept or [], initial=initial))


def conclude(aligned: Alignment, ends: Ends, judged: Judgement) -> Result:
    """Gives the verdict, and tells what limits it."""
    about, stages = aligned.reference.about, [*ends.stages.values()]
    roots = judged.roots
    echoes = sum(fate.kind == ECHO for fate in judged.fates.values())
    if not about["repeats"]:  # what differs may be chance
        echoes, roots = sum(len(stage.spots) for stage in stages), []
    unshown = notes.undetermined(aligned)
    undecided = notes.undecided(unshown, aligned.mapping)
    compared = about.get("forward") or notes.has_gradients(aligned.reference)
    agrees = "equal" if about["repeats"] and compared and not undecided else "incomplete"
    told = notes.of(aligned, stages) + [each.note for each in ends.excused if each.note]
    told += _inside(judged.fates, roots) + judged.unused
    if roots:
        told += judged.unnamed
        name_lines(roots, aligned.follower)
        if aligned.again and aligned.port.isolates:
            name_lines_of_batches(roots, aligned, aligned.again)
    if aligned.follower.lacks and aligned.mapping.left_on_one_side:
        told.append(f"names and shapes alone pair tensors: {aligned.follower.lacks}")
    guessed = [str(entry.reference) for entry in unshown]
    if roots and any(spot.rule == "loss" for spot in ends.stages["2"].spots):  # no value proves it
        guessed = notes.guessed(aligned)
    return Result(
        verdict="different" if roots else agrees,
        rungs=stages,
        roots=causes.merge_lines(causes.merge_alike(roots)),
        echoes=echoes,
        accepted=judged.accepted,
        initial=judged.drawn,
        beside=judged.beside,
        excused=ends.excused,
        mapping=aligned.mapping,
        pairs=aligned.trial.pairing.calls,
        partnerless=aligned.partnerless,
        reference=about,
        port=aligned.port.facts,
        notes=told,
        uncompared=_uncompared(aligned, ends, judged),
        shuffled=notes.shuffled_tensors(aligned.entries),
        guessed=guessed,
        undecided=undecided,
        crossed=notes.crossed(aligned.mapping),
        turned=ends.outputs.turned,
        paired_outputs=ends.outputs.guessed,
        updates=notes.updates_seen(aligned.reference, stages),
        batches=len(about["accumulated"]) or 1,
    )


def _uncompared(aligned: Alignment, ends: Ends, judged: Judgement) -> list[str]:
    """Lists what was compared with nothing, for the headline."""
    reference, port, trial = aligned.reference, aligned.port, aligned.trial
    forward_alone = bool(reference.about.get("forward"))
    states = notes.unmatched_state(reference, trial, aligned.entries) if forward_alone else []
    return [
        *states,
        *notes.untied(aligned.entries, [*ends.stages.values()]),
        *ends.outputs.lacks,
        *judged.uncompared,
        *(name for stage in ends.stages.values() for name in stage.uncompared),
        *notes.kept_alone(reference, port),
        *notes.other_batches(reference, port),
        *([] if forward_alone else notes.unshown(reference, port)),
        *compare_dropout(reference.about, port.facts, aligned.calls, trial.free.calls),
    ]


def _inside(fates: dict[Spot, Fate], roots: list[Root]) -> list[str]:
    """Notes what differs between the ends, where no end does."""
    inside = [spot for spot, fate in fates.items() if fate.kind == INSIDE and spot.rung != "0"]
    if roots or not inside:
        return []
    return [f"{len(inside)} values inside differ, such as {inside[0].where}, and no end does: a "
            "module ends elsewhere, or a gradient is stopped elsewhere"]  # fmt: skip
