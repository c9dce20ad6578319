"""Notes on what limits a verdict, a line each."""

from difflib import SequenceMatcher
from itertools import combinations
from typing import Any

import numpy as np

from lockstep.check import names
from lockstep.check.align import Alignment
from lockstep.check.layout import Entry, Piece
from lockstep.check.pairing.entries import Mapping
from lockstep.check.prove import Trial
from lockstep.check.roots.locate import list_some
from lockstep.check.rungs import Stage, changed_state, labels_of
from lockstep.check.sides.modules import Calls, module_of, shapes_of_other_sizes
from lockstep.check.sides.port import Port
from lockstep.check.sides.trace import Trace
from lockstep.judge.compare import norm_gap
from lockstep.judge.tolerances import NORM

BATCH_ROUNDING = 1e-5  # relative: one side may draw in float32
SHOWN = 1e-9  # relative: more than rounding makes of a loss


def of(aligned: Alignment, climbed: list[Stage]) -> list[str]:
    """Returns what limits the verdict, and what is odd."""
    reference, port, trial = aligned.reference, aligned.port, aligned.trial
    theirs, partnerless, entries = aligned.calls, aligned.partnerless, aligned.entries
    sides = {"reference": reference.about, "port": port.facts}
    found = [note for side, about in sides.items() for note in _precision(side, about)]
    found += [f"the recorder's hooks change gradients of the {side}, such as that of "
              f"{about['hooked'][0]}: the free rungs compare those of a run without hooks"
              for side, about in sides.items() if about.get("hooked")]  # fmt: skip
    calls, pairing = trial.free.calls, trial.pairing
    if not pairing.calls and not calls.names:
        found.append("no module of the port was paired: it shows none; one in plain JAX, Equinox "
                     "or Haiku shows its values through taps(tap)")  # fmt: skip
    elif not pairing.calls:
        found.append(
            "no module of the port was paired: its outputs have other sizes than the reference's"
        )
    elif partnerless:
        total = len(partnerless) + len(pairing.calls)
        found.append(f"{len(partnerless)} of the reference's {total} calls have no partner, such "
                     f"as {partnerless[0]}: they are compared by what follows them")  # fmt: skip
    found += _of_calls(theirs, trial, partnerless, entries)
    if turned := turned_windows(entries):
        found.append(f"{list_some(turned)}: turned half round; what is loaded there must be, too; "
                     "Flax's transpose_kernel=True does so")  # fmt: skip
    if shuffled := shuffled_tensors(entries):
        found.append(f"{list_some(shuffled)}: rows or columns stand in another order in the port; "
                     "weights of the reference that are converted without that order make another "
                     "model; --save-map writes the order")  # fmt: skip
    if pairing.reordered:
        found.append(f"{len(pairing.reordered)} values have their axes in another order, such as "
                     f"{pairing.reordered[0]}: compared in the reference's")  # fmt: skip
    masked = sorted({call for rung in climbed for call in rung.masked})
    if masked:
        found.append(f"{len(masked)} calls differ only at positions that reach no loss, such as "
                     f"{masked[0]}: padding")  # fmt: skip
    if reference.about.get("forward"):
        found.append("forward pass only, in the programs' own precision: no gradient, update or "
                     "loss curve is compared (--forward)")  # fmt: skip
    elif not has_gradients(reference):
        found.append(
            "all of the reference's gradients are zero, which shows nothing of what makes or uses "
            "them: let its loss depend on its weights, by inputs that reach them"
        )
    found += _updates(reference, climbed)
    for side, about in sides.items():
        if kept := about.get("widened_state"):
            found.append(f"the {side}'s optimizer keeps {', '.join(kept)} in float32: here float64")
        if about.get("scales"):
            found.append(f"the {side}'s GradScaler is off: `update` is given unscaled gradients")
    return found


def turned_windows(entries: list[Entry]) -> list[str]:
    """Returns the kernels of convolutions whose windows stand in the other order: such a kernel is
    paired in single places."""
    pieces: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        pieces.setdefault((entry.reference.name, entry.port.name), []).append(entry)
    return [names[0] for names, group in pieces.items()
            if len(group) > 1 and all(_is_one_place(entry) for entry in group)]  # fmt: skip


def shuffled_tensors(entries: list[Entry]) -> list[str]:
    """Returns the tensors whose rows or columns are paired in another order, one by one, as behind
    a flattening of other axes, or in blocks, as behind parts that are joined otherwise; and those
    of three or more axes that are exchanged though the shape is the same."""
    places: dict[tuple[str, str], list[tuple[int, int]]] = {}
    in_turns: set[tuple[str, str]] = set()  # on one side alone
    for entry in entries:
        both = entry.reference, entry.port
        theirs, ours = map(_place, both)
        if theirs is not None and ours is not None:
            names = entry.reference.name, entry.port.name
            places.setdefault(names, []).append((theirs, ours))
            in_turns |= {names} if len({max(c.step for c in p.cuts) for p in both}) > 1 else set()
    turned = turned_windows(entries)
    shuffled = [
        names[0]
        for names, found in places.items()
        if names[0] not in turned
        and (names in in_turns
             or [ours for _, ours in sorted(found)] != sorted(ours for _, ours in found))
    ]  # fmt: skip
    return shuffled + [
        entry.reference.name
        for entry in entries
        if entry.turned and entry.shape == entry.port_shape and len(entry.shape) > 2
        and not (entry.reference.cuts or entry.port.cuts)
    ]  # fmt: skip


def _place(piece: Piece) -> int | None:
    """Returns where the rows or columns of a piece begin; None for another piece."""
    one = len({cut.axis for cut in piece.cuts}) == 1
    return sum(cut.start for cut in piece.cuts) if one else None


def _is_one_place(entry: Entry) -> bool:
    """Says if a piece is one place of a window, on both sides; one channel is cut off, too."""
    return all(
        piece.cuts and all(cut.index for cut in piece.cuts) and (len(shape) == 2 or piece.cuts[1:])
        for piece, shape in ((entry.reference, entry.shape), (entry.port, entry.port_shape))
    )


def _of_calls(
    theirs: Calls, trial: Trial, partnerless: list[str], entries: list[Entry]
) -> list[str]:
    """Notes what is not seen of the model's output, and of other calls."""
    found = []
    taps = "tap" in trial.free.calls.kinds.values()
    if "(root)" in partnerless and taps and "(root)" not in trial.free.calls.kinds:
        found.append('what the model gives is not seen in the port: show it by tap("(root)", y)')
    found += _of_other_sizes(theirs, trial, partnerless)
    return found + _of_other_counts(theirs, trial, entries)


def _of_other_counts(theirs: Calls, trial: Trial, entries: list[Entry]) -> list[str]:
    """Returns a note on modules with tensors that are called more often on one side: the first,
    and how many more there are."""
    pairs = {module_of(r): module_of(p) for p, r in trial.pairing.calls.items()}
    holding = [entry.reference.name for entry in entries]
    told = []
    for module, ours in pairs.items():
        if not any(name.startswith((f"{module}.", f"{module}/")) for name in holding):
            continue  # such as one dropout that stands for several
        sides = (theirs, module), (trial.free.calls, ours)
        counts = [sum(module_of(call) == name for call in calls.kinds) for calls, name in sides]
        if counts[0] != counts[1]:
            told.append(f"{module} is called {_times(counts[0])} in the reference, and its "
                        f"partner {ours} {_times(counts[1])}")  # fmt: skip
    rest = f"; other modules that are called more often on one side: {len(told) - 1}"
    return [told[0] + rest * (len(told) > 1)] if told else []


def _of_other_sizes(calls: Calls, trial: Trial, partnerless: list[str]) -> list[str]:
    """Notes the first call without a partner whose namesake in the port gives another size."""
    for call in partnerless:
        if shapes := shapes_of_other_sizes(call, calls, trial.free.calls):
            return [f"{call} gives {shapes[0]} in the reference, and {shapes[1]} in the port: of "
                    "another size, it is compared with nothing"]  # fmt: skip
    return []


def _times(n: int) -> str:
    return {1: "once", 2: "twice"}.get(n, f"{n} times")


def _updates(reference: Trace, climbed: list[Stage]) -> list[str]:
    """Notes how far an optimizer was seen, and what its `update` keeps besides."""
    found = []
    rungs = {rung.number: rung for rung in climbed}
    if not rungs["4i"].lacks:
        steps = len(reference.about.get("losses", []))
        found.append(f"the optimizer was seen for {updates_seen(reference, climbed)} updates, and "
                     f"for {steps} in the loss curves: what a schedule does later is not compared "
                     "(--steps)")  # fmt: skip
        if len(labels_of(reference)) == 1:
            found.append("the reference is large: its optimizer was fed gradients of one scale; a "
                         "clip or an epsilon that others show is not compared")  # fmt: skip
    return found


def other_batches(reference: Trace, port: Port) -> list[str]:
    """Says if the port's own `batch` gives other batches than those that both were fed."""
    theirs = reference.group("batch")
    steps = len({name.partition("/")[0] for name in theirs})
    nest, ours = port.batches(steps)
    if nest is None:
        return []
    alike = theirs.keys() == ours.keys() and all(
        x.shape == ours[name].shape and norm_gap(ours[name], x) <= BATCH_ROUNDING
        for name, x in theirs.items()
    )
    return [] if alike else ["the port's own batch, which gives other values"]


def kept_alone(reference: Trace, port: Port) -> list[str]:
    """Lists the variables that the reference's `update` changes, such as averaged weights, and that
    the port does not have."""
    names_of = reference.about.get("kept", [])
    ours = port.keeps | ({name.partition("/")[0] for name in port.kept()} if names_of else set())
    return [f"{name}, which update keeps" for name in names_of if name not in ours]


def unshown(reference: Trace, port: Port) -> list[str]:
    """Lists what the runs of one program have not shown.

    That are conditions that always came out alike, such as a clip that no norm reached, if the
    other has none of the same numbers, or of the same text without any; and what a JAX program
    sets beside its arrays, which happens only while it is traced.
    """
    sides = {"reference": reference.about, "port": port.limits()}
    conditions = {name: about.get("conditions", []) for name, about in sides.items()}
    keys = {name: {*map(_condition_key, each)} for name, each in conditions.items()}
    found = [
        f"the other outcome of {each['line']} in the {name}"
        for name, other in (("reference", "port"), ("port", "reference"))
        for each in conditions[name]
        if _condition_key(each) not in keys[other]
    ]
    return (
        found
        + [
            f"{variable}, which the {name} sets while it is traced"
            for name, about in sides.items()
            for variable in about.get("sets", [])
        ]
        + [
            f"whole numbers that overflow on both sides, at {about['wraps'][0]} of the {name}"
            for name, about in [*sides.items()][:1]
            if all(each.get("wraps") for each in sides.values())
        ]
    )


def _condition_key(condition: dict[str, Any]) -> tuple[Any, ...]:
    numbers = sorted(condition["numbers"])
    text = "" if numbers else condition["line"].partition("  ")[2]
    return *numbers, text


def undetermined(aligned: Alignment) -> list[Entry]:
    """Lists the parameters that these batches do not determine, and that names alone have paired,
    not their own path: they get no gradient, or one that is nothing beside the others, and another
    value of theirs changes neither the loss nor what the model gives."""
    reference, port, trial = aligned.reference, aligned.port, aligned.trial
    grads = [reference.group(kind) for kind in ("grad", "sum")]
    sizes = [{name: float(np.linalg.norm(x)) for name, x in each.items()} for each in grads]
    least = [NORM.bound * max(each.values(), default=0.0) for each in sizes]
    by_path = aligned.mapping.by_path
    found = [e for e in aligned.entries
             if e.reference.name in sizes[0] and not (e.given or e.port.name in by_path)
             and all(e.reference.name in each and each[e.reference.name] <= bound
                     for each, bound in zip(sizes, least))]  # fmt: skip
    if not (found and port.isolates) or not _shows(port, trial, found):
        return found
    return [entry for entry in found if not _shows(port, trial, [entry])]


def _shows(port: Port, trial: Trial, entries: list[Entry]) -> bool:
    """Says if a run shows other values of some tensors, such as of a frozen copy."""
    draw = np.random.default_rng(0)
    moved = {n: trial.weights[n] + draw.normal(size=trial.weights[n].shape)
             for n in {e.port.name for e in entries}}  # fmt: skip
    plain, ran = trial.free, port.run({**trial.weights, **moved})
    pairs = [(np.array([plain.loss]), np.array([ran.loss]))]
    pairs += [(x, ran.outputs[key]) for key, x in plain.outputs.items() if key in ran.outputs]
    return any(not norm_gap(b, a) <= SHOWN for a, b in pairs)


def undecided(entries: list[Entry], mapping: Mapping) -> list[str]:
    """Lists the tensors among these whose partners might be exchanged: their names say as much of
    the one as of the other."""
    theirs, ours = (side.indexes for side in mapping.sides)

    def alike(a: Entry, b: Entry) -> tuple[int, bool]:
        common = names.words(a.port.name) & names.words(b.reference.name)
        return len(common), ours[a.port.name] == theirs[b.reference.name]

    found = set[str]()
    for a, b in combinations(entries, 2):
        one_shape = (a.shape, a.port_shape) == (b.shape, b.port_shape)
        one_shape &= a.port.name != b.port.name and a.reference.name != b.reference.name
        as_paired = sorted([alike(a, a), alike(b, b)])
        if one_shape and as_paired == sorted([alike(a, b), alike(b, a)]):
            found |= {str(a.reference), str(b.reference)}
    return sorted(found)


def crossed(mapping: Mapping) -> list[str]:
    """Lists the tensors whose values pair them against their names: of two that differ in one word
    of their paths, each looks more like the other's partner.

    Weights that are converted by name make another model of such a port.
    """
    whole = [e for e in mapping.entries if not (e.reference.cuts or e.port.cuts or e.given)]
    around: dict[tuple[Any, ...], list[tuple[str, str, Entry]]] = {}
    for entry in whole:
        paths = names.segments(entry.reference.name), names.segments(entry.port.name)
        for i, r in enumerate(paths[0]):
            for j, p in enumerate(paths[1]):
                rest = [(*path[:k], "", *path[k + 1 :]) for path, k in zip(paths, (i, j))]
                key = *map(tuple, rest), entry.shape, entry.port_shape
                around.setdefault(key, []).append((r, p, entry))

    def alike(one: str, other: str) -> float:
        return SequenceMatcher(None, one, other, autojunk=False).ratio()

    found: dict[str, str] = {}
    for group in around.values():
        for (r, p, one), (s, q, other) in combinations(group, 2):
            straight, across = alike(r, p) + alike(s, q), alike(r, q) + alike(s, p)
            if r != s and p != q and across > straight:
                for entry in (one, other):
                    found[entry.reference.name] = entry.port.name
    return [f"{r} with {p}" for r, p in found.items()]


def guessed(aligned: Alignment) -> list[str]:
    """Lists the tensors behind a difference that names alone have paired: not their path, no value
    that is met with them, and no module that is right."""
    by_path, known = aligned.mapping.by_path, vars(aligned.follower).get("found")
    trial = aligned.trial
    right = {module_of(r) for r in trial.pairing.calls.values()} - trial.wrong
    met = {} if known is None else {name: known.partners(name) for name in known.source}
    return [str(e.reference) for e in aligned.entries
            if not (e.given or e.port.name in by_path)
            and names.owner(e.reference.name) not in right
            and met.get(e.port.name) != [e.reference.name]]  # fmt: skip


def updates_seen(reference: Trace, climbed: list[Stage]) -> int:
    """Returns how many updates of the optimizer were compared."""
    rungs = {rung.number: rung for rung in climbed}
    if rungs["4i"].lacks:
        return 0
    runs = [] if rungs["4"].lacks else [len(x) for x in reference.group("varied").values()]
    return max(*labels_of(reference).values(), *runs)


def unmatched_state(reference: Trace, trial: Trial, entries: list[Entry]) -> list[str]:
    """Lists the state that the forward pass changes and that has no partner."""
    sides = (
        (reference.group("state"), reference.weights, {e.reference.name for e in entries}),
        (trial.free.state, trial.weights, {e.port.name for e in entries}),
    )
    return [
        f"{side}'s {name}"
        for side, (after, before, paired) in zip(("reference", "port"), sides)
        for name in changed_state(after, before)
        if name not in paired
    ]


def untied(entries: list[Entry], climbed: list[Stage]) -> list[str]:
    """Lists the port's own tensors for what the reference ties: they part in training, which a
    curve shows as far as it goes, and no run of the optimizer alone."""
    if any(rung.number == "8" and not rung.lacks and rung.spots for rung in climbed):
        return []
    return [f"the training of the port's {entry.port}, which the reference ties to "
            f"{entry.reference}" for entry in entries if entry.alias]  # fmt: skip


def has_gradients(reference: Trace) -> bool:
    """Says if any gradient of the recorded program is not zero."""
    return any(np.any(x) for x in reference.group("grad").values())


def _precision(side: str, about: dict[str, Any]) -> list[str]:
    if about["precision"] != "float64":
        why = ", ".join(map(str, about["narrow"][:3]))
        return [f"the {side} runs in {about['precision']} alone: blind below its noise ({why})"]
    found = []
    if about.get("weights_format") in ("bfloat16", "float16"):
        found.append(f"weights are {about['weights_format']} in the {side}, and float64 here: try "
                     "--own-precision")  # fmt: skip
    if about["widened"]:
        found.append(f"the {side} casts to narrower floats inside: here these mean float64")
    return found
