"""The report of a check: as text, roots first, and as JSON."""

import math
from typing import Any

import numpy as np

from lockstep.check import names
from lockstep.check.check import Result
from lockstep.check.outputs import PLACE
from lockstep.check.pairing.entries import Mapping
from lockstep.check.roots.locate import Root, list_some
from lockstep.check.rungs import Stage
from lockstep.errors import printable

SCHEMA = 2
SOME = 4  # of what is not compared, in the headline
NEAR = "the fault is at these or near them: the two operations are not given the same values"


def text(result: Result) -> list[str]:
    """Lines for a terminal; names come from the user's files, so they are made printable."""
    lines = [headline(result), *roots(result), *beside(result)]
    for root in result.accepted:
        lines.append(f"accepted: {root.where}, {root.direction}: {figure(root)}")
    lines.append("")
    lines += [_of_rung(rung) for rung in sorted(result.rungs, key=lambda rung: rung.number)]
    if kept := result.mapping.notes:
        lines.append(f"note: {kept[0]}" + f" ({len(kept)} such pairs)" * (len(kept) > 1))
    lines += [f"note: {note}" for note in result.notes]
    lines += rest(result)
    return [printable(line) for line in lines]


def rest(result: Result) -> list[str]:
    """Returns the lines of what was compared with nothing and has no place in the headline."""
    return [f"not compared: {name}" for name in result.uncompared[SOME:]]


def roots(result: Result) -> list[str]:
    return [line for number, root in enumerate(result.roots, 1) for line in _of_root(number, root)]


def beside(result: Result) -> list[str]:
    """Returns the lines of what differs beside the verdict: what `build` draws, float32 constants,
    and what a library lacks."""
    return [line for root in (*result.beside, *result.initial) for line in _of_root("-", root)]


def headline(result: Result) -> str:
    """Returns the verdict, of what, and what limits it."""
    sides = f"{result.port['framework']} port of {result.reference['program']}"
    sides += ", forward pass only" if result.reference.get("forward") else ""
    drawn = sum(len(root.names) for root in result.initial)
    if result.verdict == "equal":
        climbed = sum(not rung.lacks for rung in result.rungs) - bool(drawn)
        lacking = [rung.number for rung in result.rungs if rung.lacks]
        missing = f"; not run: {', '.join(lacking)}" if lacking else ""
        equal = "EQUAL from the same weights" if drawn else "EQUAL"
        return f"{equal}: {sides}, {climbed} rungs{missing}{_limits(result)}"
    if result.verdict == "incomplete":
        if not result.reference["repeats"]:
            return f"INCOMPLETE: {_random(result)}"
        if result.undecided:
            return (f"INCOMPLETE: {sides}: what was compared agrees, but neither these batches nor "
                    f"names tell which tensor is which of {list_some(result.undecided)}: pair them "
                    "by hand: --map MAP")  # fmt: skip
        return f"INCOMPLETE: {sides}: what was compared agrees, but all gradients are zero"
    roots = len(result.roots)
    more = f"{result.echoes} more finding{'s follow' if result.echoes > 1 else ' follows'}"
    follow = f" ({more} from {'them' if roots > 1 else 'it'})" if result.echoes else ""
    return f"DIFFERENT: {sides}, {roots} root{'s' * (roots != 1)}{follow}{_limits(result)}"


def _limits(result: Result) -> str:
    """Tells what stands beside a verdict, what was guessed, and what was compared with nothing."""
    found = list(dict.fromkeys(root.entry for root in result.beside))
    said = [f"beside: {name}" for name in found]
    for side, about in (("reference", result.reference), ("port", result.port)):
        if about.get("refused"):
            said.append(f"the {side} refuses float64 and ran in its own precision")
        elif about.get("precision") != "float64" and about.get("narrow"):
            said.append(f"the {side} runs in {about['precision']} alone")
    if drawn := sum(len(root.names) for root in result.initial):
        said.append(f"initial values differ ({drawn})")
    for word, names_of in (("weights in another order", result.shuffled),
                           ("paired against their names", result.crossed),
                           ("axes of outputs in another order", result.turned),
                           ("outputs paired by values or sizes", result.paired_outputs),
                           ("paired by names alone", result.guessed)):  # fmt: skip
        if names_of:
            said.append(f"{word} ({len(names_of)}): {list_some(names_of)}")
    if names_of := _uncompared(result):
        said.append(f"not compared: {', '.join(names_of)}")
    return "".join(f"; {each}" for each in said)


def _uncompared(result: Result) -> list[str]:
    """Lists what was compared with nothing, the first in full, and of an equal port where the
    comparison ends."""
    found = result.uncompared
    told = found[:SOME] + [f"{len(found) - SOME} more (see below)"] * (len(found) > SOME)
    if result.verdict != "equal":
        return told
    seen = f"{result.batches} batch" + "es" * (result.batches > 1)
    seen += f" and {result.updates} updates" if result.updates else ""
    return [*told, f"what comes after {seen}"]


def _random(result: Result) -> str:
    """Tells the reference's two losses where they are known, and the remedy."""
    losses = [result.reference.get(name) for name in ("loss", "again")]
    apart = all(type(x) is float for x in losses) and losses[0] != losses[1]
    said = f": {losses[0]:.6g}, then {losses[1]:.6g}" if apart else ""
    return (
        f"{result.reference['program']} does not repeat itself, so nothing can be compared to it: "
        f"the same weights and batch give another loss each time{said}; switch off what is random "
        "in it, or seed it in loss"
    )


def _of_root(number: int | str, root: Root) -> list[str]:
    layers = f", {root.everywhere}" if root.everywhere else ""
    if not root.everywhere and len(root.names) > 1 and root.rung in ("2i", "3i"):
        layers = f", {len(root.names)} places: {list_some(root.names)}"
    where = "; ".join(root.where.split("; ")[:4]) + "; ..." * (root.where.count("; ") > 3)
    lines = [f"{number} {where}, {root.direction}{layers}: {figure(root)}"]
    for word, said in details(root):
        first, *rest = said.splitlines()
        lines += [f"  {word}: {first}", *[f"       {line}" for line in rest]]
    if root.direction == "initial values":
        places = names.places_of([spot.where for spot in root.spots])
        lines += [f"  {places[s.where]}: {s.detail}" for s in _one_of_each(root)[:4]]
    return lines


def details(root: Root) -> list[tuple[str, str]]:
    """Returns what is known of a root: a word, such as "cause", and what it says."""
    found = [("cause" if root.rung != "1" else "found", root.cause)]
    callers = root.callers or [[], []]
    found += [(side, "\n".join([f"{line}  [{operation}]", *(f"called at {at}" for at in lines)]))
              for side, line, operation, lines
              in zip(("reference", "port"), root.lines, root.operations, callers)]  # fmt: skip
    found += [("lines", NEAR)] * root.near
    found += [("known", hint) for hint in root.hints[:2]]
    return [(word, said) for word, said in [*found, ("try", root.remedy)] if said]


def _one_of_each(root: Root) -> list[Any]:
    kinds = {names.wildcard(spot.where): spot for spot in reversed(root.spots)}
    return sorted(kinds.values(), key=lambda spot: -spot.figure)


def figure(root: Root) -> str:
    largest = root.largest
    if root.rung == "1":
        return f"{len(root.names)} tensor{'s' * (len(root.names) != 1)} without a partner"
    if root.rung == "0" and not math.isfinite(largest.figure):
        constant = sum(not math.isfinite(spot.figure) for spot in root.spots)
        total = len(root.spots)
        tensors = f"{total} tensor{'s' * (total != 1)}"
        return f"{tensors}, {constant} of them constant on one side, or another constant"
    if largest.rule == "end":
        return "one side ends earlier"
    if largest.rule == PLACE:
        return f"{len(root.spots)} outputs are equal, and stand at another place"
    if not math.isfinite(largest.figure):
        return f"not comparable: {_infinite(largest.ours, largest.theirs)}"
    if root.rung == "0":
        return f"{largest.figure:.2g} standard errors apart, by chance at most {largest.bound:.2g}"
    return f"{largest.figure:.2g} (bound {largest.bound:.2g})"


def _infinite(ours: np.ndarray | None, theirs: np.ndarray | None) -> str:
    """Says why the gap of two arrays is infinite."""
    if ours is None or theirs is None:
        return "another value, size, or not finite"
    if ours.size != theirs.size:
        return "of another size"
    if np.isfinite(theirs).all() and np.isfinite(ours).all():
        return "the reference's is zero"
    return f"the {'reference' if np.isfinite(ours).all() else 'port'}'s is not finite"


def outcome(rung: Stage) -> str:
    """Says how many of a rung's figures differ, or why it was not run."""
    if rung.lacks:
        return f"not run: {rung.lacks}"
    total, different = len(rung.findings), len(rung.spots)
    if rung.number == "1":
        return f"{total - different} of {total} paired"
    excused = f" ({len(rung.excused)} excused)" if rung.excused else ""
    return f"{different} of {total} different{excused}" if different else f"{total} equal{excused}"


def _of_rung(rung: Stage) -> str:
    line = f"rung {rung.number:2} {rung.name:22} {outcome(rung)}"
    if rung.lacks or rung.number == "1":
        return line
    worst = rung.worst
    if not math.isfinite(worst.figure):
        return f"{line}, such as {worst.where}"
    return f"{line}; largest {worst.figure:.2g} (bound {worst.bound:.2g}), {worst.where}"


def to_json(result: Result) -> dict[str, Any]:
    """Returns the report in the schema that docs/check-reference.md describes."""
    return {
        "schema": SCHEMA,
        "verdict": result.verdict,
        "roots": [_root_json(root) for root in result.roots],
        "accepted": [_root_json(root) for root in result.accepted],
        "beside": [_root_json(root) for root in result.beside],
        "initial_values": [_root_json(root) for root in result.initial],
        "excused": [{"excuse": each.name, "findings": len(each.spots),
                     "residual": _number(each.residual), "bound": _number(each.bound)}
                    for each in result.excused],
        "echoes": result.echoes, "uncompared": result.uncompared, "reordered": result.shuffled,
        "guessed": result.guessed, "undecided": result.undecided, "crossed": result.crossed,
        "turned": result.turned, "paired_outputs": result.paired_outputs,
        "updates": result.updates, "batches": result.batches,
        "rungs": [_rung_json(rung) for rung in result.rungs],
        "mapping": map_json(result),
        "notes": [*result.mapping.notes, *result.notes],
        "reference": _about(result.reference), "port": _about(result.port),
    }  # fmt: skip


def map_json(result: Result) -> dict[str, Any]:
    """Returns the mapping: what `--map` reads."""
    return {
        "tensors": tensors_json(result.mapping), "modules": result.pairs,
        "only_reference": result.mapping.only_reference, "only_port": result.mapping.only_port,
        "modules_without_partner": result.partnerless,
    }  # fmt: skip


def tensors_json(mapping: Mapping) -> list[dict[str, Any]]:
    return [
        {"port": e.port.to_json(), "reference": e.reference.to_json(), "axes": list(e.permutation),
         **({"tied": e.alias} if e.alias else {})}
        for e in mapping.entries
    ]  # fmt: skip


def _rung_json(rung: Stage) -> dict[str, Any]:
    worst = rung.worst
    return {
        "rung": rung.number, "name": rung.name, "compared": len(rung.findings),
        "different": len(rung.spots), "largest": _number(worst.figure),
        "bound": _number(worst.bound), "at": worst.where, "not_run": rung.lacks,
    }  # fmt: skip


def _root_json(root: Root) -> dict[str, Any]:
    return {
        "rung": root.rung, "where": root.where, "direction": root.direction, "names": root.names,
        "figure": _number(root.largest.figure), "bound": _number(root.largest.bound),
        "entry": root.entry, "cause": root.cause, "try": root.remedy, "hints": root.hints,
        "lines": root.lines, "operations": root.operations, "callers": root.callers,
        "near": root.near,
    }  # fmt: skip


def _about(about: dict[str, Any]) -> dict[str, Any]:
    kept = ("framework", "versions", "device", "precision", "program", "seed")
    return {name: about[name] for name in kept if name in about}


def _number(x: float) -> float | None:
    return float(x) if math.isfinite(x) else None
