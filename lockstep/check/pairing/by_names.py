"""Which tensor of the port is which of the reference: proposed by index, kind, shape and names."""

from collections import Counter
from collections.abc import Mapping as AnyMapping
from dataclasses import replace
from math import prod
from typing import Any

from lockstep.check import names
from lockstep.check.layout import Cut, Entry, Piece, Shape, fitting_permutations
from lockstep.check.pairing.entries import Mapping, drop_used, keep, likely_axes, make_entry
from lockstep.check.pairing.fused import match_fused, match_stacked
from lockstep.check.pairing.gates import match_gates
from lockstep.check.pairing.siblings import mark_copies
from lockstep.check.pairing.tensors import Tensors
from lockstep.errors import UserError, require

KERNEL, GAIN, BIAS = range(3)
Home = tuple[Shape, ...]  # the shapes of the tensors that a module holds
LINEAR = {"Linear", "Dense"}  # out before in with torch, in before out with Flax


def propose(
    reference: Tensors, port: Tensors, overrides: AnyMapping[str, Any] | None = None,
    found: list[Entry] | None = None, *, joined: str = "",
) -> Mapping:  # fmt: skip
    """Pairs what is given, what values have found, and then, by names and shapes, whole tensors.

    Args:
        found: entries of which values are the proof; they come after what is given.
        joined: names and shapes pair stacked layers and fused tensors, too: "blocks" where the
            parts of these are, "turns" where their rows stand in turns.
    """
    mapping = Mapping([], list(reference.shapes), list(port.shapes), [], (reference, port))
    _match_given(mapping, overrides or {}, reference, port)
    mapping.entries += _untouched(found or [], mapping)
    drop_used(mapping)
    match_gates(mapping, reference, port)
    _match_whole(mapping, reference, port)
    if joined:
        match_stacked(mapping, reference, port)
        for stacked in ("", "layers", "experts"):
            match_fused(mapping, reference, port, stacked=stacked, turns=joined == "turns")
    _match_tied(mapping, reference, port)
    mapping.entries = _by_exact_path(mapping.entries, mapping)
    mapping.entries = [_as_usual(entry, mapping) for entry in mapping.entries]
    mapping.entries = _alike_squares(mapping.entries, mapping)
    order = {name: at for at, name in enumerate(port.order)}
    mapping.entries.sort(key=lambda entry: order[entry.port.name])
    _require_whole(mapping, reference, port)
    return mapping


def _untouched(found: list[Entry], mapping: Mapping) -> list[Entry]:
    """Leaves out what shares a tensor with what is given."""
    left = {*mapping.only_reference}, {*mapping.only_port}
    kept = [e for e in found if e.reference.name in left[0] and e.port.name in left[1]]
    while True:
        gone = [entry for entry in found if entry not in kept]
        theirs, ours = ({getattr(e, side).name for e in gone} for side in ("reference", "port"))
        fewer = [e for e in kept if e.reference.name not in theirs and e.port.name not in ours]
        if len(fewer) == len(kept):
            return kept
        kept = fewer


def _by_exact_path(entries: list[Entry], mapping: Mapping) -> list[Entry]:
    """Gives each tensor of the port whose path is a path of the reference that one's tensor for its
    partner, whatever values or other names say: a checkpoint is loaded by it. Numbers judge where
    both sides have the same, for one side may count what the other does not."""
    paths = [names.exact_paths([*side.shapes]) for side in mapping.sides]
    theirs: dict[names.Path, list[int]] = {}
    ours: dict[names.Path, list[int]] = {}
    for at, entry in enumerate(entries):
        if not (entry.given or entry.alias):
            for found, paths_of, piece in ((theirs, paths[0], entry.reference),
                                           (ours, paths[1], entry.port)):  # fmt: skip
                if path := _path_of(piece, paths_of[piece.name]):
                    found.setdefault(path, []).append(at)
    made = list(entries)
    for path, held in ours.items():
        words = path[0]
        numbers = [{n for w, n in side if w == words} for side in (theirs, ours)]
        if len(held) != 1 or len(theirs.get(path, ())) != 1 or numbers[0] != numbers[1]:
            continue
        one, other = held[0], theirs[path][0]
        holder = next((n for n in range(len(made)) if made[n].reference == entries[other].reference
                       and not made[n].alias), one)  # fmt: skip
        if holder != one:
            exchanged = [_with_partner(made[one], made[holder].reference, mapping),
                         _with_partner(made[holder], made[one].reference, mapping)]  # fmt: skip
            if all(entry.choices for entry in exchanged):
                made[one], made[holder] = exchanged
    return made


def _path_of(piece: Piece, path: names.Path) -> names.Path | None:
    """Returns the path of a whole tensor, or of a layer of a stack; None of another part."""
    if not piece.cuts:
        return path
    words, numbers = path
    one = len(piece.cuts) == 1 and piece.layer is not None
    return (words, (piece.layer, *numbers)) if one and piece.layer is not None else None


def _with_partner(entry: Entry, piece: Piece, mapping: Mapping) -> Entry:
    reference, port = mapping.sides
    if piece.shape(reference.shapes) == entry.shape:
        return replace(entry, reference=piece)
    return make_entry(reference, piece, port, entry.port)


def _as_usual(entry: Entry, mapping: Mapping) -> Entry:
    """Gives a square kernel the order of axes that a checkpoint of its kind has, also where values
    say that the port uses it in the other: that is a bug."""
    if not _is_flat(entry) or entry.given or len(set(entry.shape)) > 1:
        return entry
    (reference, port), names_of = mapping.sides, (entry.reference.name, entry.port.name)
    kinds = {reference.kinds.get(names_of[0], ""), port.kinds.get(names_of[1], "")}
    if reference.framework == port.framework and len({*names_of}) == len(kinds) == 1:
        usual = {False}
    elif any("mbed" in kind for kind in kinds):
        usual = {False}  # a table has its rows first, in each framework
    elif reference.framework != port.framework and kinds <= LINEAR:
        usual = {True}
    else:  # as others whose shapes tell: of its leaf, else of its module's class
        others = [other for other in mapping.entries
                  if _is_flat(other) and len(set(other.shape)) > 1]  # fmt: skip
        of_kind, of_class = (
            [other.turned for other in others if kind(other, mapping) == kind(entry, mapping)]
            for kind in (_kind, _classes)
        )
        usual = {*(of_kind or of_class)}
        if not usual and kinds.isdisjoint(LINEAR) and _same_path(entry, mapping):
            usual = {False}  # a plain tensor of one name, which is copied as it is
    turned = usual if len(usual) == 1 else {entry.turned}
    return replace(entry, choices=sorted([(0, 1), (1, 0)], reverse=turned == {True}), chosen=0)


def _alike_squares(entries: list[Entry], mapping: Mapping) -> list[Entry]:
    """Gives all square kernels of one kind of module one order of axes, that of most of them: one
    that a port uses otherwise than the others is turned."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for at, entry in enumerate(entries):
        if _is_flat(entry) and len(set(entry.shape)) == 1 and not entry.given:
            groups.setdefault(tuple(_classes(entry, mapping)), []).append(at)
    made = list(entries)
    for kinds, group in groups.items():
        turned = Counter(entries[at].turned for at in group)
        if len(turned) == 2 and LINEAR & {*kinds}:
            likely = likely_axes(mapping.sides[0], entries[group[0]].reference.name,
                                 mapping.sides[1], entries[group[0]].port.name, 2)  # fmt: skip
            most = max(turned, key=lambda each: (turned[each], each == (likely == (1, 0))))
            for at in group:
                axes = (1, 0) if most else (0, 1)
                made[at] = replace(entries[at], choices=[axes, axes[::-1]], chosen=0)
    return made


def _is_flat(entry: Entry) -> bool:
    return len(entry.shape) == len(entry.port_shape) == 2


def _classes(entry: Entry, mapping: Mapping) -> list[Any]:
    """Returns the class of the module that holds a tensor, on both sides."""
    pieces = (entry.reference.name, entry.port.name)
    return [side.kinds.get(name, "") for side, name in zip(mapping.sides, pieces)]


def _same_path(entry: Entry, mapping: Mapping) -> bool:
    paths = [names.exact_paths([*side.shapes]) for side in mapping.sides]
    return paths[0][entry.reference.name] == paths[1][entry.port.name]


def _kind(entry: Entry, mapping: Mapping) -> list[Any]:
    """Returns the class of the module and the last word of the name, on both sides."""
    pieces = (entry.reference.name, entry.port.name)
    return [(side.kinds.get(name, ""), names.segments(name)[-1])
            for side, name in zip(mapping.sides, pieces)]  # fmt: skip


def _require_whole(mapping: Mapping, reference: Tensors, port: Tensors) -> None:
    """Refuses a map by hand that leaves elements out: they would be compared with nothing. Drops
    the entries of a tensor that were not given by hand and do so."""
    while found := _left_out(mapping, reference, port):
        side, name, size, whole = found
        own = [entry for entry in mapping.entries if getattr(entry, side).name == name]
        require(not any(entry.given for entry in own), "--map", name,
                f"{size} of its {whole} elements are paired; pair each once")  # fmt: skip
        mapping.entries = [entry for entry in mapping.entries if entry not in own]
        used = [
            {getattr(entry, s).name for entry in mapping.entries} for s in ("reference", "port")
        ]
        theirs, ours = ({getattr(entry, s).name for entry in own} for s in ("reference", "port"))
        mapping.only_reference += sorted(theirs - used[0] - {*mapping.only_reference})
        mapping.only_port += sorted(ours - used[1] - {*mapping.only_port})


def _left_out(
    mapping: Mapping, reference: Tensors, port: Tensors
) -> tuple[str, str, int, int] | None:  # fmt: skip
    """Finds a tensor of which not each element is paired once: its side, its name, how many are,
    and how many there are."""
    for side, tensors in (("reference", reference), ("port", port)):
        sizes: dict[str, int] = {}
        for entry in mapping.entries:
            if side == "port" or not entry.alias:
                name = getattr(entry, side).name
                sizes[name] = sizes.get(name, 0) + prod(entry.shape)
        for name, size in sizes.items():
            if size != (whole := prod(tensors.shapes[name])):
                return side, name, size, whole
    return None


def _match_whole(mapping: Mapping, reference: Tensors, port: Tensors) -> None:
    """Greedy by the likeness of names; what names leave open, the order of calls decides."""
    ours, theirs = names.align_indexes(port.indexes, reference.indexes)
    places = [
        (_places(side, indexes), _places(side, dict.fromkeys(indexes, ())))
        for side, indexes in ((reference, theirs), (port, ours))
    ]
    within = [_places_in_module(side) for side in (reference, port)]
    homes = _homes(reference, port)
    proven = _owners_paired(mapping)  # such as those of running statistics
    copies = Copies(reference, port, mapping.entries)
    owners: dict[str, str] = {}  # a module's bias goes where its kernel went
    for rank in (KERNEL, GAIN, BIAS):
        scored = []
        for p in mapping.only_port:
            for r in mapping.only_reference:
                if _rank(p, port) != rank or not _may_pair(reference, r, port, p):
                    continue
                owner = proven.get(port.owner(p))
                if owner is not None and owner != reference.owner(r):
                    continue
                if not owner and ours[p] and theirs[r] and ours[p] != theirs[r]:
                    continue
                shapes = reference.shapes[r], port.shapes[p]
                if not fitting_permutations(*shapes):
                    continue
                if _is_stack(r, reference, p, port) or _is_stack(p, port, r, reference):
                    continue
                at = not (ours[p] and theirs[r])  # one side does not number its layers
                far = abs(places[0][at][r] - places[1][at][p])
                (place, of), (own, of_own) = within[0][r], within[1][p]
                owned = _of_one_owner(owners, reference.owner(r), port.owner(p))
                score = likeness(reference, r, port, p) + owned
                # A table of (8, 2) fits a gain of 16 elements, if nothing else; (1, 16) is as it.
                long = [[n for n in shape if n > 1] for shape in shapes]
                axes = _has_axes(r, reference) != _has_axes(p, port)
                first = axes and long[0] != long[1], ours[p] != theirs[r]
                last = (
                    len(homes[0][r] ^ homes[1][p]),
                    axes or _is_unusual(reference, r, port, p),
                    _is_another(reference, r, port, p),
                    abs(place - own) if of == of_own else 0,
                    far,
                )
                scored.append((first, -round(score, 6), last, p, r))
        _take_best(mapping, sorted(scored), reference, port, owners, copies)


def _is_stack(name: str, side: Tensors, other: str, others: Tensors) -> bool:
    """Says if a tensor is one of all layers where another, of more or fewer axes, is of one."""
    shape, layers = side.shapes[name], others.layers
    one = bool(others.indexes[other]) and not side.indexes[name]
    return one and layers > 1 and shape[:1] == (layers,) and len(shape) != len(others.shapes[other])


def _owners_paired(mapping: Mapping) -> dict[str, str]:
    """Maps a module of the port to that of the reference which has all of its partners so far."""
    found: dict[str, set[str]] = {}
    reference, port = mapping.sides
    for entry in mapping.entries:
        theirs = reference.owner(entry.reference.name)
        found.setdefault(port.owner(entry.port.name), set()).add(theirs)
    single = ((ours, next(iter(theirs))) for ours, theirs in found.items() if len(theirs) == 1)
    return {ours: theirs for ours, theirs in single if ours}  # "" where there are no modules


def _places(side: Tensors, indexes: names.Indexes) -> dict[str, int]:
    """Maps names to their modules' places in the order of calls, within layer and size."""
    found: dict[str, int] = {}
    seen: dict[tuple[tuple[int, ...], int], list[str]] = {}
    for name in side.order:
        owners = seen.setdefault((indexes[name], prod(side.shapes[name])), [])
        owner = side.spelt[name].rpartition(".")[0]
        owners += [owner] * (owner not in owners)
        found[name] = owners.index(owner)
    return found


def _places_in_module(side: Tensors) -> dict[str, tuple[int, int]]:
    """Maps names to their places in the order of calls among the same module's tensors of their
    size and last word, and to how many these are."""
    groups: dict[tuple[str, int, str], list[str]] = {}
    for name in side.order:
        *outer, last = names.segments(side.spelt[name])
        groups.setdefault((".".join(outer[:-1]), prod(side.shapes[name]), last), []).append(name)
    return {name: (at, len(group)) for group in groups.values() for at, name in enumerate(group)}


def _rank(name: str, side: Tensors) -> int:
    """Kernels first, then gains, then biases: the later follow the modules of the earlier."""
    return BIAS if names.is_bias(side.spelt[name]) else KERNEL if _has_axes(name, side) else GAIN


def _has_axes(name: str, side: Tensors) -> bool:
    """Says if a tensor is more than a vector; a weight's length, of (8, 1, 1), is none."""
    return len(side.shapes[name]) > 1 and names.segments(side.spelt[name])[-1] != "g"


def _is_unusual(reference: Tensors, r: str, port: Tensors, p: str) -> bool:
    """Says if a kernel's axes cannot stand as its framework has them."""
    theirs, ours = reference.shapes[r], port.shapes[p]
    usual = likely_axes(reference, r, port, p)
    return len(theirs) == len(ours) and ours != tuple(theirs[axis] for axis in usual)


def _is_another(reference: Tensors, r: str, port: Tensors, p: str) -> bool:
    """Says if one is of fc1 and the other of fc2, where both sides number as many."""
    theirs, ours = reference.numbers.get(r), port.numbers.get(p)
    return theirs is not None and ours is not None and theirs[1] == ours[1] and theirs != ours


def _homes(reference: Tensors, port: Tensors) -> list[dict[str, set[Home]]]:
    """Maps each side's tensors to those modules around them that are told by what they hold: each
    side has one module of these shapes, whatever its name, such as an actor beside a critic."""
    held: list[dict[frozenset[str], Home]] = []
    for side in (reference, port):
        inside: dict[str, set[str]] = {}
        for name in side.shapes:
            path = names.segments(name)
            for at in range(1, len(path)):
                inside.setdefault(".".join(path[:at]), set()).add(name)
        held.append({
            frozenset(found): tuple(sorted(
                tuple(sorted(n for n in side.shapes[name] if n > 1)) for name in found
            )) for found in inside.values() if len(found) > 1
        })  # fmt: skip
    counts = [Counter(found.values()) for found in held]
    return [
        {name: {home for members, home in found.items()
                if name in members and counts[0][home] == counts[1][home] == 1}
         for name in side.shapes} for side, found in zip((reference, port), held)
    ]  # fmt: skip


# The least is the best.
Score = tuple[tuple[bool, bool], float, tuple[int, bool, bool, int, int], str, str]


def _take_best(
    mapping: Mapping, scored: list[Score], reference: Tensors, port: Tensors,
    owners: dict[str, str], copies: "Copies",
) -> None:  # fmt: skip
    """Takes the best pairs; last those that speak against the partners of other copies."""
    free_port, free_reference = set(mapping.only_port), set(mapping.only_reference)
    for is_last in (False, True):
        for *_, p, r in scored:
            taken = p not in free_port or r not in free_reference
            if taken or not (is_last or copies.allow(r, p)):
                continue
            mapping.entries.append(make_entry(reference, Piece(r), port, Piece(p)))
            copies.add(r, p)
            owners[port.owner(p)] = reference.owner(r)
            free_port.remove(p)
            free_reference.remove(r)
    keep(mapping, free_reference, free_port)


class Copies:
    """Modules of one structure, as often on both sides: what is paired in one is so in all."""

    def __init__(self, reference: Tensors, port: Tensors, entries: list[Entry]) -> None:
        self.marks = [mark_copies(side.shapes) for side in (reference, port)]
        self.counts = [Counter(marks.values()) for marks in self.marks]
        self.partners: list[dict[str, str]] = [{}, {}]
        for entry in entries:
            if not (entry.reference.cuts or entry.port.cuts or entry.alias):
                self.add(entry.reference.name, entry.port.name)

    def _marks(self, r: str, p: str) -> tuple[str, str] | None:
        theirs, ours = self.marks[0][r], self.marks[1][p]
        return (theirs, ours) if self.counts[0][theirs] == self.counts[1][ours] > 1 else None

    def add(self, r: str, p: str) -> None:
        if marks := self._marks(r, p):
            self.partners[0].setdefault(marks[0], marks[1])
            self.partners[1].setdefault(marks[1], marks[0])

    def allow(self, r: str, p: str) -> bool:
        """Says if no other copy's pair speaks against this."""
        marks = self._marks(r, p)
        return not marks or (
            self.partners[0].get(marks[0], marks[1]) == marks[1]
            and self.partners[1].get(marks[1], marks[0]) == marks[0]
        )


def _of_one_owner(owners: dict[str, str], r: str, p: str) -> float:
    """Scores two modules by whether they are partners already."""
    partner = owners.get(p)
    if partner is None:
        return 0.0
    if partner == r:
        return 3.5
    same = names.across_layers(partner) == names.across_layers(r)
    return 3.0 if same else -3.0


def _may_pair(reference: Tensors, r: str, port: Tensors, p: str) -> bool:
    """Says if no name speaks against a pair."""
    kinds = (r in reference.parameters) is (p in port.parameters)
    return kinds and names.may_be_alike(port.spelt[p], reference.spelt[r])


def likeness(reference: Tensors, r: str, port: Tensors, p: str) -> float:
    """Words in common over all words, those of the last module counted twice; kinds alike."""
    spelt = port.spelt[p], reference.spelt[r]
    whole = names.share_of_words(*spelt)
    last = names.share_of_words(*(".".join(names.segments(name)[-2:]) for name in spelt))
    kinds = [names.words(side.kinds.get(n, "")) for side, n in ((reference, r), (port, p))]
    alike = len(kinds[0] & kinds[1]) / max(len(kinds[0] | kinds[1]), 1)
    return round(whole + last + alike, 6)


def exchange(mapping: Mapping, pairs: list[tuple[str, str]]) -> bool:
    """Exchanges the partners of each two tensors of the port; False where these do not fit."""
    entries = {entry.port.name: at for at, entry in enumerate(mapping.entries)}
    if not all(name in entries for pair in pairs for name in pair):
        return False
    made = list(mapping.entries)
    for a, b in pairs:
        former = made[entries[a]], made[entries[b]]
        for old, other in (former, former[::-1]):
            new = make_entry(mapping.sides[0], other.reference, mapping.sides[1], old.port)
            if not new.choices or old.port.cuts:
                return False
            made[entries[old.port.name]] = new
    mapping.entries[:] = made
    return True


def _match_tied(mapping: Mapping, reference: Tensors, port: Tensors) -> None:
    """Pairs a tensor of the port's own with what the reference ties to another."""
    for p in list(mapping.only_port):
        for alias, r in reference.aliases.items():
            if fitting_permutations(reference.shapes[r], port.shapes[p]) and (
                names.words(alias) & names.words(p)
            ):
                entry = make_entry(reference, Piece(r), port, Piece(p))
                if reference.framework != port.framework:
                    entry.choices.sort(key=lambda c: c != (1, 0))
                entry.alias = alias
                mapping.entries.append(entry)
                mapping.only_port.remove(p)
                break


def _match_given(
    mapping: Mapping, lines: AnyMapping[str, Any], reference: Tensors, port: Tensors
) -> None:
    """Pairs what `--map` says, before all else. Raises UserError where it cannot be."""
    tensors = lines.get("tensors", [])
    require(type(tensors) is list, "--map", "tensors", "is no list; give what --save-map wrote")
    for at, line in enumerate(tensors):
        where = f"--map tensors[{at}]"
        try:
            r, p = (_piece(line[side]) for side in ("reference", "port"))
            axes = None if line.get("axes") is None else tuple(line["axes"])
            known = r.name in reference.shapes and p.name in port.shapes
            require(known, where, f"{p.name}, {r.name}", "names no such tensor; check its names")
            entry = make_entry(reference, r, port, p)
        except (TypeError, KeyError, ValueError, IndexError, AttributeError):
            raise UserError(f"{where}: malformed; give what --save-map wrote") from None
        require(bool(entry.choices), where, f"{p} {entry.port_shape}",
                f"does not fit {r} {entry.shape} under any order of axes")  # fmt: skip
        if axes is not None:
            entry.choices = [each for each in entry.choices if each == axes]
            require(bool(entry.choices), where, axes, "are no axes under which it fits")
        entry.alias, entry.given = str(line.get("tied", "")), True
        mapping.entries.append(entry)
    drop_used(mapping)


def _piece(given: AnyMapping[str, Any]) -> Piece:
    """Raises ValueError, among others, where it is none; an array has at most 64 axes."""
    cuts = [Cut(int(a), int(b), int(c), bool(i), *map(int, step))
            for a, b, c, i, *step in given.get("cuts", [])]  # fmt: skip
    places = {place for cut in cuts for place in (cut.start, cut.stop)}
    if not ({cut.axis for cut in cuts} <= {*range(64)} and all(0 <= p < 2**40 for p in places)):
        raise ValueError
    if not all(0 < cut.step < 2**40 for cut in cuts):
        raise ValueError
    return Piece(given["name"], tuple(cuts))
