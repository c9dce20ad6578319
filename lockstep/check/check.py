"""One check: the reference's trace, the port's program, all rungs, the roots."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lockstep.check import causes, locate, mapping, modules, rungs
from lockstep.check.layout import Entry
from lockstep.check.modules import Calls
from lockstep.check.port import Port, Run, aliases_of, tensors_of
from lockstep.check.rungs import Bounds, Rung
from lockstep.check.trace import Trace
from lockstep.model.params import Arrays
from lockstep_recorder.recording import STATISTICS, nudge

Say = Callable[[str], None]
NOISY = 3  # runs from which the port's noise is measured, below float64


@dataclass
class Result:
    """What a check found."""

    verdict: str  # equal, different, incomplete
    rungs: list[Rung]
    roots: list[locate.Root]
    echoes: int
    accepted: list[locate.Root]
    mapping: mapping.Mapping
    pairs: dict[str, str]  # the port's call -> the reference's
    partnerless: list[str]
    reference: dict[str, Any]
    port: dict[str, Any]
    notes: list[str] = field(default_factory=list)


def run(
    reference: Trace, port: Port, *, overrides: dict[str, Any] | None = None,
    accept: list[str] | None = None, say: Say = lambda line: None,
) -> Result:  # fmt: skip
    """Climbs every rung that the two programs allow."""
    calls = Calls(reference.about["events"], reference.about["kinds"], reference.arrays,
                  aliases_of(reference.about["tied"]))  # fmt: skip
    found = port.mapping = propose(reference, port, overrides or {})
    _drop_constants(found, reference, port)
    entries = found.entries
    say(f"mapping: {len(entries)} pieces; {len(found.only_reference)} tensors of the reference and "
        f"{len(found.only_port)} of the port without a partner")  # fmt: skip
    weights = port.weights(reference.weights)
    free = port.run(weights)
    pairs = modules.pair_calls(entries, calls, free.calls)
    isolated = _prove(port, reference, calls, pairs, free, weights)
    if any(entry.chosen for entry in entries):
        weights = port.weights(reference.weights)
        free = port.run(weights)
    say(f"modules: {len(pairs)} calls paired of {len(calls.names)} in the reference")
    bounds = _bounds(reference, port, weights, free)
    loss = reference.about["loss"]
    climbed = [
        rungs.initial_values(entries, port, reference), _mapping_rung(found),
        rungs.activations("2", "activations", pairs, calls, free, loss, bounds,
                          states(entries, free, reference)),
        rungs.activations("2i", "activations, isolated", pairs, calls, isolated, loss, bounds,
                          states(entries, isolated, reference)),
        rungs.gradients("3", "gradients", pairs, entries, reference, calls, free, bounds),
        rungs.gradients("3i", "gradients, isolated", pairs, entries, reference, calls, isolated,
                        bounds),
    ]  # fmt: skip
    say("activations and gradients compared")
    climbed += [rungs.updates(port, reference, entries), accumulation(),
                rungs.curves(port, reference)]  # fmt: skip
    partnerless = [r for r in calls.names if r not in pairs.values()]
    roots, echoes = locate.find_roots(climbed, calls, pairs, partnerless)
    roots = _unmatched(found) + roots
    causes.explain(roots, causes.Evidence(reference, port, calls, free, isolated, pairs, entries))
    accepted = [root for root in roots if _is_accepted(root, accept or [])]
    roots = [root for root in roots if root not in accepted]
    notes = _notes(reference, port, free, pairs)
    verdict = (
        "different" if roots else "incomplete" if _is_incomplete(climbed, reference) else "equal"
    )
    return Result(verdict, climbed, roots, echoes, accepted, found, pairs, partnerless,
                  reference.about, port.facts, notes)  # fmt: skip


def propose(reference: Trace, port: Port, overrides: dict[str, Any]) -> mapping.Mapping:
    """By a first run of the port on its own weights, for the order of its calls."""
    first = port.run(port.initial)
    theirs = tensors_of(reference.about, reference.weights, reference.about["events"],
                        reference.about["kinds"])  # fmt: skip
    ours = tensors_of(port.facts, port.initial, first.calls.events, first.calls.kinds)
    return mapping.propose(theirs, ours, overrides)


def _drop_constants(found: mapping.Mapping, reference: Trace, port: Port) -> None:
    """A buffer that is no running statistic needs no partner: a port computes it in place."""
    ours, theirs = set(port.facts["parameters"]), set(reference.about["parameters"])
    found.only_port = [n for n in found.only_port if n in ours or STATISTICS.search(n)]
    found.only_reference = [n for n in found.only_reference if n in theirs or STATISTICS.search(n)]


def _forced(calls: Calls, free: Run, pairs: dict[str, str]) -> Arrays:
    """The reference's inputs, outputs and cotangents, in the port's shapes."""
    made: Arrays = {}
    for p, r in pairs.items():
        for kind in ("in", "act", "dact"):
            ours, theirs = free.calls.arrays.get(f"{kind}/{p}"), calls.arrays.get(f"{kind}/{r}")
            if ours is not None and theirs is not None and ours.size == theirs.size:
                made[f"{kind}/{p}"] = modules.convert(theirs, ours.shape)
    return made


def _prove(
    port: Port, reference: Trace, calls: Calls, pairs: dict[str, str], free: Run, weights: Arrays
) -> Run:
    """The isolated run; a kernel whose shape leaves its axes open is turned if that is right."""
    assert port.mapping
    forced = _forced(calls, free, pairs)
    isolated = port.run(weights, forced=forced)
    bounds = Bounds(reference)

    def wrong(ran: Run) -> set[str]:
        rung = rungs.activations("2i", "", pairs, calls, ran, reference.about["loss"], bounds, [])
        return {spot.where.partition("#")[0] for spot in rung.spots}

    before = wrong(isolated)
    open_ones = [e for e in port.mapping.entries if len(e.choices) > 1 and _touches(e, before)]
    for entry in open_ones[:200]:
        entry.chosen = 1
    if open_ones:
        turned = port.run(port.weights(reference.weights), forced=forced)
        after = wrong(turned)
        for entry in open_ones:
            entry.chosen = 0 if _touches(entry, after) else 1
        if any(entry.chosen for entry in open_ones):
            isolated = port.run(port.weights(reference.weights), forced=forced)
    return isolated


def _touches(entry: Entry, wrong: set[str]) -> bool:
    owner = (entry.alias or entry.reference.name).rpartition(".")[0]
    parent = owner.rpartition(".")[0]
    return owner in wrong or parent in wrong


def _bounds(reference: Trace, port: Port, weights: Arrays, free: Run) -> Bounds:
    if reference.about["precision"] == port.precision == "float64":
        return Bounds(reference)
    return Bounds(reference, noise_of(port, weights, free))


def noise_of(port: Port, weights: Arrays, plain: Run) -> dict[str, float]:
    """How far the port parts from itself when its weights move by one ulp of float32."""
    noise = {"loss": 0.0}
    for seed in range(NOISY):
        ran = port.run(nudge(weights, seed, "float32"))
        noise["loss"] = max(noise["loss"], abs(ran.loss - plain.loss) / (abs(plain.loss) or 1))
        arrays = ran.calls.arrays | {f"grad/{n}": g for n, g in ran.grads.items()}
        plains = plain.calls.arrays | {f"grad/{n}": g for n, g in plain.grads.items()}
        for name, x in arrays.items():
            noise[name] = max(noise.get(name, 0.0), rungs.gap(x, plains[name]))
    return noise


def states(entries: list[Entry], ran: Run, reference: Trace) -> list[rungs.Pieces]:
    """What the forward pass left in running statistics, beside the reference's."""
    return rungs.by_piece(entries, ran.state, reference.group("state"))


def _mapping_rung(found: mapping.Mapping) -> Rung:
    rung = Rung("1", "mapping", compared=len(found.entries), bound=1.0)
    for name in (*found.only_reference, *found.only_port):
        rung.spots.append(rungs.Spot("1", "mapping", name, float("inf"), 0.0))
    return rung


def _unmatched(found: mapping.Mapping) -> list[locate.Root]:
    roots = []
    for side, names in (("reference", found.only_reference), ("port", found.only_port)):
        if names:
            spots = [rungs.Spot("1", "mapping", name, float("inf"), 0.0) for name in names]
            listed = ", ".join(names[:4]) + (
                f" and {len(names) - 4} more" if len(names) > 4 else ""
            )
            root = locate.Root("1", listed, "mapping", spots, names, spots[0])
            root.cause = f"tensors of the {side} alone: nothing on the other side fits them"
            root.remedy = "add them to the port, or pair them by hand: --map MAP"
            roots.append(root)
    return roots


def accumulation() -> Rung:
    return Rung("5", "accumulation", lacks="one batch is one step here")


def _is_accepted(root: locate.Root, accept: list[str]) -> bool:
    return any(name in (root.where, root.name, root.direction) or name in root.names
               for name in accept)  # fmt: skip


def _is_incomplete(climbed: list[Rung], reference: Trace) -> bool:
    """Nothing was compared where it matters, or the reference does not repeat itself."""
    isolated = next(rung for rung in climbed if rung.number == "2i")
    return not reference.about["repeats"] or isolated.compared <= 1  # the loss alone


def _notes(reference: Trace, port: Port, free: Run, pairs: dict[str, str]) -> list[str]:
    notes = []
    for side, about in (("reference", reference.about), ("port", port.facts)):
        if about["precision"] != "float64":
            why = ", ".join(map(str, about["narrow"][:3]))
            notes.append(f"the {side} runs in {about['precision']} alone: blind below its noise "
                         f"({why})")  # fmt: skip
        elif about.get("widened"):
            notes.append(f"the {side} casts to narrower floats inside: here these mean float64")
    if not pairs:
        notes.append(
            "no module of the port was paired: "
            + (
                "its outputs have other sizes than the reference's"
                if free.calls.names
                else "it shows none; a port in plain JAX shows its values through taps(tap)"
            )
        )
    if not reference.about["repeats"]:
        notes.append("the reference gives another loss each time: switch off what is random")
    return notes
