"""Entries of a mapping, from the elements that following the data has paired."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations, dropwhile, pairwise
from math import prod

import numpy as np

from lockstep.check import names
from lockstep.check.following.follow import OPEN, Followed
from lockstep.check.layout import Cut, Entry, Piece, fitting_permutations
from lockstep.check.pairing.entries import Mapping
from lockstep.check.pairing.tensors import Tensors

MOST = 2_000  # pieces of one tensor
JOINED = 4  # ... that a program joins by hand
Key = tuple[str, str, str, frozenset[str], frozenset[str]]
Layer = tuple[int | None, ...]  # numbers of the modules that hold a tensor, or its place in a stack
Found = tuple[Piece, Piece, tuple[int, ...]]  # of the reference, of the port; the order of axes


def entries_of(found: Followed, reference: Tensors, port: Tensors) -> list[Entry]:
    """Makes entries of the port's tensors all of whose elements have partners.

    What is left out: a tensor of which a part has no partner, on either side; a copy of what the
    reference does not tie; a table whose rows stand in another order; a kernel whose window does;
    and in one framework a tensor that the reference has by the same name and shape, but for parts
    joined in another order: its weights are copied by that name. These are a bug where they are
    no layout, and values do not tell.
    """
    aliases = {name: alias for alias, name in reference.aliases.items()}
    tied = {word for alias in aliases.values() for word in names.words(alias)}

    def speaks_against(name: str) -> int:
        partners = found.partners(name) if name in found.source else []
        alike = {word for partner in partners for word in names.words(partner)}
        return len(names.words(name) & tied) - len(names.words(name) & alike)

    taken = np.zeros(sum(map(prod, found.shapes.values())), bool)
    entries: list[Entry] = []
    for name in sorted(port.shapes, key=speaks_against):
        places = found.source.get(name, np.array(OPEN))
        if name in found.unused or (places == OPEN).any():
            continue
        pieces = _Splitting(found).split(places, Piece(name)) or []
        copies = taken[places].any()  # what has a partner already
        untied = copies and not all(r.name in aliases for r, _, _ in pieces)
        moved = places.ndim < 3 and _is_in_another_order([r for r, _, _ in pieces], reference)
        if untied or (moved and name not in found.permuted) or turns_window(pieces, reference):
            continue
        if _is_copied(name, reference, port) and not _is_joined(name, pieces, port):
            continue
        taken[places] = True
        for r, p, axes in pieces:
            shape, port_shape = r.shape(reference.shapes), p.shape(port.shapes)
            alias = aliases[r.name] if copies else ""
            entries.append(Entry(r, p, shape, port_shape, [axes], alias=alias))
    entries = _whole(entries, reference)
    if not found.equal:  # what is met behind a difference is a guess
        entries = _whole(_leave_out_torn(entries, found, reference, port), reference)
    return _in_order_of_layers(_uncross(entries, reference, port), reference, port)


def _leave_out_torn(
    entries: list[Entry], found: Followed, reference: Tensors, port: Tensors
) -> list[Entry]:
    """Leaves out a tensor that is put together of parts of several modules or of another layer, or
    while a whole tensor of its layer fits it; either way round. One that does not reach the
    loss is left to one of the other side that does not, if it fits."""
    ours, theirs = names.align_indexes(port.indexes, reference.indexes)
    idle = [(p, r) for p in found.unused for r in found.idle
            if fitting_permutations(found.shapes[r], found.source[p].shape)]  # fmt: skip
    torn: set[str] = set()  # of the port
    for fusing, splitting, indexes, others in (
        (port, reference, ours, theirs), (reference, port, theirs, ours)
    ):  # fmt: skip
        pairs = [(e.port, e.reference) if fusing is port else (e.reference, e.port)
                 for e in entries]  # fmt: skip
        taken = {part.name for whole, part in pairs if not (whole.cuts or part.cuts)}
        taken |= {pair[fusing is port] for pair in idle}
        beside = {(indexes[whole.name], others[part.name]) for whole, part in pairs
                  if not (whole.cuts or part.cuts)}  # fmt: skip
        groups: dict[tuple[str, int | None], set[str]] = {}
        for whole, part in pairs:
            if whole.layer is None or len(whole.cuts) > 1:
                groups.setdefault((whole.name, whole.layer), set()).add(part.name)
        for (name, layer), parts in groups.items():
            layers, around = {others[part] for part in parts}, {names.outer(part) for part in parts}
            own = indexes[name] if layer is None else ()
            fits = layer is None and any(
                others[other] == own and fitting_permutations(shape, fusing.shapes[name])
                for other, shape in splitting.shapes.items() if other not in taken
            )  # fmt: skip
            # Numbers may count otherwise: whole tensors of the two layers are partners then.
            across = len(layers) > 1 or bool(
                own and {own} != layers and (own, *layers) not in beside
            )
            if len(parts) > 1 and (across or len(around) > 1 or fits):
                torn |= {e.port.name for e, (whole, _) in zip(entries, pairs) if whole.name == name}
    return [entry for entry in entries if entry.port.name not in torn]


def _is_copied(name: str, reference: Tensors, port: Tensors) -> bool:
    same = reference.framework == port.framework
    return same and reference.shapes.get(name) == port.shapes[name]


def _is_joined(name: str, pieces: list[Found], port: Tensors) -> bool:
    """Says if a tensor is itself, or a matrix of a few parts of itself in another order; many parts
    and parts in turns are rows or columns that are read otherwise, and a window has an order of its
    own."""
    if len(port.shapes[name]) > 2:
        return all(r == p and axes == tuple(range(len(axes))) for r, p, axes in pieces)
    in_turns = any(cut.step > 1 for r, p, _ in pieces for cut in (*r.cuts, *p.cuts))
    return len(pieces) <= JOINED and not in_turns and all(r.name == name for r, _, _ in pieces)


def _is_in_another_order(pieces: list[Piece], reference: Tensors) -> bool:
    """Says if several pieces of one tensor do not follow one another as in it, such as a table
    whose rows are reversed; those of a part of a fused tensor do. It has no window of its own."""
    inside = {piece.name for piece in pieces}
    if len(inside) != 1 or len(reference.shapes[pieces[0].name]) > 2:
        return False
    ends = [[(cut.start, cut.stop) for cut in piece.cuts] for piece in pieces]
    return any(
        [start for start, _ in after] < [stop for _, stop in before]
        for before, after in pairwise(ends)
    )


def permuted_modules(mapping: Mapping) -> set[str]:
    """Finds the port's modules that hold a tensor whose rows or columns stand in another order."""
    found: dict[str, list[Entry]] = {}
    for entry in mapping.entries:
        found.setdefault(entry.port.name, []).append(entry)
    return {
        name.rpartition(".")[0] for name, group in found.items()
        if len(mapping.sides[1].shapes[name]) < 3
        and _is_in_another_order([entry.reference for entry in group], mapping.sides[0])
    }  # fmt: skip


def turns_window(pieces: Sequence[Found], reference: Tensors) -> bool:
    """Says if a convolution's kernel has its window turned over: only a transposed one may have a
    half turn, in some frameworks, and none has its height and width exchanged. A first axis of
    one, as of a kernel that each row of a batch modulates, is no part of it."""
    r = pieces[0][0] if pieces else Piece("")
    kind, shape = reference.kinds.get(r.name, ""), reference.shapes.get(r.name, ())
    n = len(tuple(dropwhile(lambda length: length == 1, shape[:-3])) + shape[-3:])
    if "Conv" not in kind or n < 3:
        return False
    most = max(Counter(piece.name for piece, _, _ in pieces).values())
    if most > 1:  # of one kernel, not a stack of several
        return "Transpose" not in kind
    first = len(shape) - n + 2 if reference.framework == "torch" else 0
    windows = ([axes.index(axis) for axis in range(first, first + n - 2) if axis in axes]
               for _, _, axes in pieces)  # fmt: skip
    return any(window != sorted(window) for window in windows)


def _uncross(entries: list[Entry], reference: Tensors, port: Tensors) -> list[Entry]:
    """Exchanges partners whose names say that each is the other's, such as a port's `key` beside
    the reference's `value`."""
    groups: dict[Key, list[int]] = {}
    roles = [_roles(entries, at, side) for at, side in enumerate((reference, port))]
    for at, entry in enumerate(entries):
        ours = _words(entry.port, port, roles[1])
        theirs = _words(entry.reference, reference, roles[0])
        around = names.outer(entry.reference.name) + str(_layer_of(entry.reference))
        key = around, entry.port.name, entry.reference.name
        groups.setdefault((*key, frozenset(ours), frozenset(theirs)), []).append(at)
    made = list(entries)
    for one, other in combinations(groups, 2):
        (around, *_, p, r), (beside, *_, q, s) = one, other
        crossed = p & (s - r) and q & (r - s) and not (p & (r - s) or q & (s - r))
        a, b = groups[one], groups[other]
        alike = [entries[at].shape for at in a] == [entries[at].shape for at in b]
        alike &= names.is_bias(one[1]) == names.is_bias(other[1])
        if around == beside and crossed and alike:
            for at, partner in zip([*a, *b], [*b, *a]):
                made[at] = replace(entries[at], reference=entries[partner].reference)
    return made


def _in_order_of_layers(entries: list[Entry], reference: Tensors, port: Tensors) -> list[Entry]:
    """Pairs layers by their numbers where values pair the same layers in another order, such as
    those of a port that runs them backwards. One side may have them in a stack."""
    theirs, ours = reference.indexes, port.indexes
    groups: dict[tuple[str, ...], list[tuple[Layer, Layer, int]]] = {}
    for at, entry in enumerate(entries):
        r, p = entry.reference, entry.port
        if theirs[r.name] or ours[p.name]:
            places = _place(r, theirs), _place(p, ours), str(entry.shape)
            layers = theirs[r.name] or (r.layer,), ours[p.name] or (p.layer,)
            groups.setdefault(places, []).append((*layers, at))
    made = list(entries)
    for group in groups.values():
        partners = {layer: at for layer, _, at in group}
        if len(partners) == len(group) and partners.keys() == {layer for _, layer, _ in group}:
            for _, layer, at in group:
                made[at] = replace(entries[at], reference=entries[partners[layer]].reference)
    return made


def _place(piece: Piece, numbers: names.Indexes) -> str:
    """Names a piece's place in all layers; that in a stack without its layer."""
    whole = bool(numbers[piece.name])
    within = [cut for cut in piece.cuts if whole or cut.axis or not cut.index]
    return names.wildcard(piece.name) + "".join(map(str, within))


def _roles(entries: list[Entry], at: int, side: Tensors) -> dict[Piece, str]:
    """Maps the parts of one side's fused tensors to the roles that the tensor's name gives them:
    the first of a query, a key and a value is the query, wherever these stand.

    Args:
        at: of a side in an entry, 0 for the reference.
    """
    parts: dict[tuple[str, tuple[Cut, ...]], dict[str, list[Piece]]] = {}
    for entry in entries:
        piece, partner = (entry.reference, entry.port)[:: 1 - 2 * at]
        if _part_of(piece):
            whole = piece.name, _layer_of(piece)
            parts.setdefault(whole, {}).setdefault(partner.name, []).append(piece)
    found: dict[Piece, str] = {}
    for (name, _), partners in parts.items():
        groups = sorted(partners.values(), key=lambda group: min(map(_part_of, group)))
        for role, group in zip(names.roles(side.spelt[name], len(groups)), groups):
            found |= dict.fromkeys(group, role)
    return found


def _layer_of(piece: Piece) -> tuple[Cut, ...]:
    return tuple(cut for cut in piece.cuts if cut.index and not cut.axis)


def _part_of(piece: Piece) -> list[int]:
    """Where a piece that is a part of what is fused begins; [] of one that is whole, or a layer."""
    return [cut.start for cut in piece.cuts if not cut.index][-1:]


def _words(piece: Piece, side: Tensors, roles: dict[Piece, str]) -> frozenset[str]:
    """Splits a name into words; a part of what is fused has its own role alone."""
    words = names.words(side.spelt[piece.name])
    return words - names.ROLES | {roles[piece]} if piece in roles else words


def _whole(entries: list[Entry], reference: Tensors) -> list[Entry]:
    """Leaves out what shares a tensor of which not each element is paired, again and again."""
    while True:
        sizes = Counter({entry.reference.name: 0 for entry in entries})
        for entry in entries:
            sizes[entry.reference.name] += 0 if entry.alias else prod(entry.shape)
        partly = {name for name, size in sizes.items() if size != prod(reference.shapes[name])}
        if not partly:
            return entries
        ours = {entry.port.name for entry in entries if entry.reference.name in partly}
        entries = [entry for entry in entries if entry.port.name not in ours]


class _Splitting:
    """Splits one tensor of the port into pieces, each a turned slice of one of the reference's."""

    def __init__(self, found: Followed) -> None:
        self.names = list(found.starts)
        self.starts = np.array(list(found.starts.values()))
        self.shapes = found.shapes

    def split(self, places: np.ndarray, piece: Piece, most: int = MOST) -> list[Found] | None:
        """Returns the fewest pieces that are found; None where they are more than `most`."""
        owners = np.searchsorted(self.starts, places, "right") - 1
        whole = self._slice_of_one(places, owners)
        if whole:
            return [(whole[0], piece, whole[1])]
        best = None
        for axis in range(places.ndim if most > 1 else 0):
            parts = self._split_along(axis, places, owners, piece, most)
            if parts is not None:
                best, most = parts, len(parts) - 1
        return best

    def _split_along(
        self, axis: int, places: np.ndarray, owners: np.ndarray, piece: Piece, most: int
    ) -> list[Found] | None:
        parts: list[Found] = []
        for cut in self._cuts(places, owners, axis):
            made = self.split(cut.of(places), piece.cut(cut), most - len(parts))
            if made is None or len(parts) + len(made) > most:
                return None
            parts += made
        return parts

    def _cuts(self, places: np.ndarray, owners: np.ndarray, axis: int) -> Iterable[Cut]:
        """Cuts an axis where the owners change, or where they take turns, by these; where they do
        not change, where elements do not follow one another as elsewhere; else at each place."""
        rows = np.moveaxis(owners, axis, 0).reshape(owners.shape[axis], -1)
        changes = np.flatnonzero((rows[1:] != rows[:-1]).any(1)) + 1
        turns = len(np.unique(rows, axis=0))
        if 1 < turns < len(changes) == len(rows) - 1 and (rows[turns:] == rows[:-turns]).all():
            for start in range(turns):
                yield Cut(axis, start, len(rows), False, turns)
            return
        steps = np.diff(np.moveaxis(places, axis, 0).reshape(len(rows), -1)[:, 0])
        if not len(changes) and len(steps):
            kinds, counts = np.unique(steps, return_counts=True)
            changes = np.flatnonzero(steps != kinds[counts.argmax()]) + 1
        edges = [0, *changes.tolist(), len(rows)] if len(changes) else range(len(rows) + 1)
        for start, stop in pairwise(edges):
            yield Cut(axis, start, stop, stop - start == 1)

    def _slice_of_one(
        self, places: np.ndarray, owners: np.ndarray
    ) -> tuple[Piece, tuple[int, ...]] | None:
        owner = int(owners.flat[0])
        if (owners != owner).any():
            return None
        name, shape = self.names[owner], self.shapes[self.names[owner]]
        at = np.unravel_index(places - self.starts[owner], shape) if shape else ()
        ranges = [_range_of(np.unique(x)) for x in at]
        if None in ranges or prod(map(len, filter(None, ranges))) != places.size:
            return None
        cuts, kept = [], []
        within = np.zeros(places.shape, np.int64)
        for axis, found in enumerate(ranges):
            assert found
            one = len(found) == 1 < shape[axis]
            if len(found) != shape[axis]:
                cuts.append(Cut(axis, found.start, found.stop, one, found.step))
            if not one:
                kept.append(axis)
                within = within * len(found) + (at[axis] - found.start) // found.step
        cuts.reverse()  # so that the others keep their numbers
        inner = tuple(len(ranges[axis] or ()) for axis in kept)
        axes = turn_between(within, inner)
        return None if axes is None else (Piece(name, tuple(cuts)), axes)


def _range_of(indices: np.ndarray) -> range | None:
    """Returns ascending indices as a range; None where they are at unlike distances."""
    first, last = int(indices[0]), int(indices[-1])
    step = int(indices[1]) - first if len(indices) > 1 else 1
    found = range(first, last + 1, step)
    return found if np.array_equal(indices, found) else None


def turn_between(within: np.ndarray, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns the order of axes in which an array of a shape, whose elements are numbered through,
    becomes this one; None where no order does."""
    numbered = np.arange(within.size).reshape(shape)
    for axes in fitting_permutations(shape, within.shape):
        if np.array_equal(numbered.transpose(axes).reshape(within.shape), within):
            return axes
    return None
