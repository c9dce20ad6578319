"""A fused tensor, such as that of query, key and value, beside the tensors that make it up."""

from itertools import permutations
from math import prod

from lockstep.check import names
from lockstep.check.layout import fitting_permutations
from lockstep.check.tensors import Tensors


def parts_of(
    name: str, whole: Tensors, pool: list[str], parts: Tensors
) -> tuple[int, list[str], list[int]] | None:
    """(axis, tensors in order, their lengths along it) that make up a fused tensor."""
    shape, index = whole.shapes[name], whole.indexes[name]
    near = [
        p for p in pool
        if parts.indexes[p] == index and names.may_be_alike(p, name)
        and (p in parts.parameters) is (name in whole.parameters)
    ]  # fmt: skip
    best: tuple[tuple[bool, int], tuple[int, list[str], list[int]]] | None = None
    own = names.words(".".join(names.segments(name)[:-1]))
    for n in (3, 2):
        for members in _together(near, n, parts):
            for axis in range(len(shape)):
                along = prod((*shape[:axis], *shape[axis + 1 :]))
                lengths = [prod(parts.shapes[m]) // along for m in members]
                pieces = [(*shape[:axis], length, *shape[axis + 1 :]) for length in lengths]
                fits = sum(lengths) == shape[axis] and all(
                    fitting_permutations(piece, parts.shapes[m])
                    for piece, m in zip(pieces, members)
                )
                kernel_axis = axis == (0 if whole.framework == "torch" else len(shape) - 1)
                around = names.words(".".join(names.segments(members[0])[:-2]))
                score = kernel_axis, len(own & around)
                if fits and (best is None or score > best[0]):
                    best = score, (axis, list(members), lengths)
        if best:
            return best[1]
    return None


def _together(pool: list[str], n: int, side: Tensors) -> list[tuple[str, ...]]:
    """Groups of n tensors of sibling modules, in the order query, key, value or of calls."""
    parents: dict[tuple[str, ...], list[str]] = {}
    for name in pool:
        parents.setdefault(tuple(names.segments(name)[:-2]), []).append(name)
    rank = {"query": 0, "key": 1, "value": 2, "gate": 0, "up": 1}
    order = {name: at for at, name in enumerate(side.order)}

    def place(name: str) -> tuple[int, int]:
        own = names.words(".".join(names.segments(name)[-2:]))
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
