"""Fused tensors and stacked layers beside the tensors that make them up, by names and shapes alone:
for programs whose data is too large to be followed."""

import re
from collections import Counter
from itertools import accumulate, pairwise, permutations, takewhile
from math import prod

from lockstep.check import names
from lockstep.check.layout import Cut, Piece, fitting_permutations
from lockstep.check.pairing.entries import Mapping, drop_used, make_entry
from lockstep.check.pairing.tensors import Tensors

View = tuple[Tensors, dict[str, Piece]]  # a side, and what its names stand for


def match_stacked(mapping: Mapping, reference: Tensors, port: Tensors) -> None:
    """Pairs a tensor with a leading axis of layers, or of experts in each layer, with one tensor
    for each, either way round."""
    for ours, theirs, port_stacks in ((port, reference, True), (reference, port, False)):
        stacked = mapping.only_port if port_stacks else mapping.only_reference
        singles = mapping.only_reference if port_stacks else mapping.only_port
        groups = _groups(singles, theirs)
        scored = []
        for s in stacked:
            shape = ours.shapes[s]
            for key, members in groups.items():
                single, alone = theirs.shapes[members[0]], {theirs.shapes[m] for m in members}
                both = (single, shape[1:]) if port_stacks else (shape[1:], single)
                fits = len(shape) > 1 and fitting_permutations(*both)
                kinds = (members[0] in theirs.parameters) is (s in ours.parameters)
                layers = _shared_index([theirs.indexes[m] for m in members]), ours.indexes[s]
                inside = layers[0] == () or layers[0][: len(layers[1])] == layers[1]
                if shape[:1] == (len(members),) and alone == {single} and fits and kinds and inside:
                    words = names.words(theirs.spelt[members[0]]), names.words(ours.spelt[s])
                    common = len(words[0] & words[1])
                    share = names.share_of_words(theirs.spelt[members[0]], ours.spelt[s])
                    scored.append((layers[0] != layers[1], -common, -share, s, key))
        done: set[str] = set()
        for *_, s, key in sorted(scored):
            members = sorted(groups[key], key=lambda m: (theirs.indexes[m], _counted(m)))
            if done & {s, *members}:
                continue
            entries = []
            for k, member in enumerate(members):
                pieces = [Piece(member), Piece(s).cut(Cut(0, k, k + 1, True))]
                r, p = pieces if port_stacks else reversed(pieces)
                entries.append(make_entry(reference, r, port, p))
            if all(entry.choices for entry in entries):
                done |= {s, *members}
                mapping.entries += entries
        drop_used(mapping)


def _groups(singles: list[str], side: Tensors) -> dict[str, list[str]]:
    """Groups tensors that a stack may hold: of all layers, and of those inside one."""
    groups: dict[str, list[str]] = {}
    for name in singles:
        if not side.indexes[name]:
            continue
        owner, leaf = names.owner(name), names.segments(name)[-1]
        keys = {names.across_layers(owner)}
        path = owner.split(".")
        for at, segment in enumerate(path):
            number = names.numbered(segment)
            if number and (at < len(path) - 1 or segment.isdecimal()):
                keys.add(".".join([*path[:at], f"{number[0]}*", *path[at + 1 :]]))
        for key in keys:
            groups.setdefault(f"{key}.{leaf}", []).append(name)
    return groups


def _counted(name: str) -> list[int]:
    return [int(segment) for segment in names.segments(name) if segment.isdecimal()]


def _shared_index(indexes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Returns the first numbers, which the members of a stack have in common."""
    shared = takewhile(lambda group: len({*group}) == 1, zip(*indexes))
    return tuple(group[0] for group in shared)


def match_fused(
    mapping: Mapping, reference: Tensors, port: Tensors, *, stacked: str = "", turns: bool = False
) -> None:
    """One tensor beside two or three whose axes add up, such as qkv; either way round.

    Args:
        stacked: "layers" where a fused tensor has a leading axis of layers, or the others have;
            "experts" where a fused tensor has one of its module's, which others number.
        turns: the parts' rows stand in turns, and not in blocks.
    """
    for port_fuses in (True, False):
        fusing, splitting = (port, reference) if port_fuses else (reference, port)
        only = [mapping.only_port, mapping.only_reference]
        fused, pool = only if port_fuses else reversed(only)
        whole, parts = _view(fusing, fused), _view(splitting, pool)
        if stacked == "experts":
            parts = _by_expert(*parts)
            whole = _unstacked(whole[0], _experts(parts[0]), inside=True)
        elif stacked:
            layers, others = parts[0].layers, whole[0].layers
            whole = _unstacked(whole[0], {layers}) if layers > 1 else whole
            parts = _unstacked(parts[0], {others}) if others > 1 and layers < 2 else parts
        indexes = names.align_indexes(parts[0].indexes, whole[0].indexes)
        sides = ("port", "reference") if port_fuses else ("reference", "port")
        outers = [tuple(names.outer(getattr(entry, side).name) for side in sides)
                  for entry in mapping.entries]  # fmt: skip
        free = list(parts[1])
        for name, piece in whole[1].items():
            # Other tensors of the modules around that are partners already.
            partners = Counter(b for a, b in outers if a == names.outer(piece.name))
            known = {p: partners[names.outer(parts[1][p].name)] for p in free}
            found = parts_of(name, whole[0], known, parts[0], indexes)
            if not found:
                continue
            axis, members, lengths = found
            entries = []
            for member, cut in zip(members, _cuts(axis, lengths, turns)):
                pieces = [parts[1][member], piece.cut(cut)]
                r, p = pieces if port_fuses else reversed(pieces)
                entries.append(make_entry(reference, r, port, p))
            if all(entry.choices for entry in entries):
                mapping.entries += entries
                free = [each for each in free if each not in members]
        drop_used(mapping)


def _cuts(axis: int, lengths: list[int], turns: bool) -> list[Cut]:
    """Cuts an axis into blocks, or into parts of one length whose rows stand in turns."""
    if turns and len({*lengths}) == 1:
        count, length = len(lengths), sum(lengths)
        return [Cut(axis, at, length, False, count) for at in range(count)]
    ends = [0, *accumulate(lengths)]
    return [Cut(axis, start, stop) for start, stop in pairwise(ends)]


def _by_expert(side: Tensors, pieces: dict[str, Piece]) -> View:
    """Spells the lists `up.0` and `gate.0`, of a linear layer for each expert, as the modules
    `0.up` and `0.gate`."""
    spelt = {}
    for name in side.shapes:
        *outer, owner, number, leaf = "", "", *names.segments(name)
        path = [*outer, number, owner, leaf] if number.isdecimal() else [name]
        spelt[name] = ".".join(filter(None, path))
    turned = Tensors(
        {spelt[name]: shape for name, shape in side.shapes.items()},
        {spelt[name]: kind for name, kind in side.kinds.items() if name in spelt},
        [spelt[name] for name in side.order], side.framework,
        {spelt[name] for name in side.parameters & spelt.keys()},
    )  # fmt: skip
    return turned, {spelt[name]: piece for name, piece in pieces.items()}


def _experts(side: Tensors) -> set[int]:
    """Returns how many modules are numbered inside of one, such as the experts of a layer."""
    groups: dict[tuple[int, ...], set[int]] = {}
    for *outer, own in filter(None, side.indexes.values()):
        groups.setdefault(tuple(outer), set()).add(own)
    return {len(group) for group in groups.values() if len(group) > 1}


def _view(side: Tensors, only: list[str]) -> View:
    kept = {name: side.shapes[name] for name in side.shapes if name in set(only)}
    order = [name for name in side.order if name in kept]
    whole = Tensors(kept, side.kinds, order, side.framework, side.parameters)
    return whole, {name: Piece(name) for name in kept}


def _unstacked(side: Tensors, counts: set[int], *, inside: bool = False) -> View:
    """Each tensor with a leading axis of some length as one a place, whose number stands before its
    name; or, of modules inside of its own, before its last word."""

    def numbered(name: str, number: int) -> str:
        *outer, leaf = names.segments(name)
        return ".".join([*outer, str(number), leaf]) if inside else f"{number}.{name}"

    pieces = {
        numbered(name, k): Piece(name).cut(Cut(0, k, k + 1, True))
        for name, shape in side.shapes.items() if len(shape) > 1 and shape[0] in counts
        for k in range(shape[0])
    }  # fmt: skip
    whole = Tensors(
        {name: piece.shape(side.shapes) for name, piece in pieces.items()},
        {name: side.kinds.get(piece.name, "") for name, piece in pieces.items()},
        sorted(pieces, key=lambda name: side.order.index(pieces[name].name)), side.framework,
        {name for name, piece in pieces.items() if piece.name in side.parameters},
    )  # fmt: skip
    return whole, pieces


def parts_of(
    name: str, whole: Tensors, pool: dict[str, int], parts: Tensors,
    indexes: tuple[names.Indexes, names.Indexes],
) -> tuple[int, list[str], list[int]] | None:  # fmt: skip
    """(axis, tensors in order, their lengths along it) that make up a fused tensor.

    Args:
        pool: the parts, and what speaks for the module of each: partners that are known.
        indexes: of the parts, and of the whole.
    """
    shape, index = whole.shapes[name], indexes[1][name]
    near = [
        p for p in pool
        if indexes[0][p] == index and names.may_be_alike(p, name)
        and (p in parts.parameters) is (name in whole.parameters)
    ]  # fmt: skip
    best: tuple[tuple[bool, int, int, float], tuple[int, list[str], list[int]]] | None = None
    outer = ".".join(names.segments(name)[:-1])
    for n in (3, 2, 4, 5):
        for axis in range(len(shape)):
            along = prod((*shape[:axis], *shape[axis + 1 :]))
            lengths = {p: prod(parts.shapes[p]) // along for p in near}
            fitting = [
                p for p in near if 0 < lengths[p] < shape[axis] and fitting_permutations(
                    (*shape[:axis], lengths[p], *shape[axis + 1 :]), parts.shapes[p])
            ]  # fmt: skip
            for members in _together(fitting, n, parts):
                if sum(lengths[m] for m in members) != shape[axis]:
                    continue
                kernel_axis = axis == (0 if whole.framework == "torch" else len(shape) - 1)
                inner = ".".join(names.segments(members[0])[:-2])
                common = len(names.words(outer) & names.words(inner))
                score = kernel_axis, pool[members[0]], common, _spelt_alike(outer, inner)
                if best is None or score > best[0]:
                    best = score, (axis, list(members), [lengths[m] for m in members])
        if best:
            return best[1]
    return None


def _spelt_alike(a: str, b: str) -> float:
    """Groups of letters in common over all: `self_attn` is no `multihead_attn`."""
    ours, theirs = (set(re.findall("[a-z]+", name.lower())) for name in (a, b))
    return len(ours & theirs) / max(len(ours | theirs), 1)


def _together(pool: list[str], n: int, side: Tensors) -> list[tuple[str, ...]]:
    """Groups of n tensors of sibling modules, in the order query, key, value or of calls."""
    parents: dict[tuple[str, ...], list[str]] = {}
    for name in pool:
        parents.setdefault(tuple(names.segments(name)[:-2]), []).append(name)
    rank = {"query": 0, "key": 1, "value": 2, "gate": 0, "up": 1}
    order = {name: at for at, name in enumerate(side.order)}

    def place(name: str) -> tuple[int, int]:
        own = names.words(".".join(names.segments(side.spelt[name])[-2:]))
        return min([rank[w] for w in own if w in rank], default=9), order.get(name, 0)

    groups = []
    for members in parents.values():
        ranked = sorted(members, key=place)
        named = [m for m in ranked if place(m)[0] < 9]
        if len(named) == n:
            groups.append(tuple(named))
        elif len(ranked) <= 6:
            groups += [g for g in permutations(ranked, n) if list(g) == sorted(g, key=place)]
    return groups
