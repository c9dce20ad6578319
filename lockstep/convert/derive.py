"""The rules of a map from what `lockstep check` has proved at one size."""

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from lockstep.convert.axes import (
    NAME,
    Node,
    Product,
    Size,
    Sum,
    TensorAxes,
    Unfit,
    Unit,
    axes_text,
    length,
    names_in,
    regions,
    sums_in,
)
from lockstep.convert.names import name_patterns
from lockstep.convert.plan import Pattern, Shape, TensorRule

LETTERS = "abcdefghijklmnopqrstuvwxyz"
MOST_PARTS = 16  # that follow one another in no regular order
REFERENCE, PORT = 0, 1
BOTH = (REFERENCE, PORT)
Shapes = Mapping[str, Shape]
Steps = tuple[int, ...]


class Box(NamedTuple):
    """The places along an axis of a tensor that cuts leave."""

    start: int
    stays: bool  # or it is one place, and no axis any more
    step: int


class Part(NamedTuple):
    """The part of a tensor that cuts leave."""

    name: str
    boxes: tuple[Box, ...]
    shape: Shape


class Named(NamedTuple):
    """A part of the reference and the port's, and their tensors' names with indices."""

    parts: tuple[Part, Part]
    order: Shape  # of the reference's axes, in the port
    patterns: tuple[str, str]
    values: dict[str, int]  # of the indices

    @property
    def names(self) -> tuple[str, str]:
        return self.parts[REFERENCE].name, self.parts[PORT].name


class Digit(NamedTuple):
    """A loop along an axis."""

    atom: int
    times: int
    stride: int


class Strip(NamedTuple):
    """Where a block stands along an axis."""

    block: int
    start: int
    digits: tuple[Digit, ...]


@dataclass
class Overlap:
    """The elements that a tensor of each side has in common, as loops along their axes."""

    patterns: tuple[str, str]
    strips: tuple[list[Strip], list[Strip]]  # of both sides, by axis


@dataclass
class Derived:
    """Rules.

    Attributes:
        sizes: those that hold for the whole model.
        without: tensors of the reference that no rule describes, with the reason.
    """

    rules: list[TensorRule] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    without: dict[str, str] = field(default_factory=dict)


def derive_rules(proved: Sequence[Mapping[str, Any]], shapes: tuple[Shapes, Shapes]) -> Derived:
    """Finds rules that give these pairs of tensors, and those of models of other sizes.

    Args:
        proved: `tensors` of the mapping that `lockstep check` reports.
        shapes: of the reference's and the port's tensors, by name.
    """
    parts = [
        (_part(each["reference"], shapes[REFERENCE]), _part(each["port"], shapes[PORT]))
        for each in proved
    ]
    patterns = name_patterns([(r.name, p.name) for r, p in parts])
    named = [Named(both, tuple(each["axes"]), *found)
             for both, each, found in zip(parts, proved, patterns)]  # fmt: skip
    derived = Derived()
    for each in named:
        if name := next((name for name in each.names if {"{", "}"} & {*name}), ""):
            reason = f"the name {name} has a brace, which marks an index in a map; rename it"
            derived.without[each.names[REFERENCE]] = reason
    named = [each for each in named if each.names[REFERENCE] not in derived.without]
    for group in _components(named, lambda each: each.patterns):
        _derive_rule(group, shapes, derived)
    derived.rules = _mark_partial(derived.rules, named)
    return derived


def _part(piece: Mapping[str, Any], shapes: Shapes) -> Part:
    """Applies the cuts of a piece: [axis, start, stop, one place, step]."""
    shape = shapes[piece["name"]]
    boxes, axes = [Box(0, True, 1) for _ in shape], [*range(len(shape))]
    left = np.broadcast_to(np.False_, shape)
    for axis, first, stop, one, *rest in piece.get("cuts", []):
        start, _, step = boxes[axes[axis]]
        boxes[axes[axis]] = Box(start + step * first, not one, step * (rest or [1])[0])
        left = left[(*[slice(None)] * axis, first if one else slice(first, stop, *rest or [1]))]
        if one:
            axes.pop(axis)
    return Part(piece["name"], tuple(boxes), left.shape)


def _components(
    named: Iterable[Named], ends: Callable[[Named], tuple[str, str]]
) -> list[list[Named]]:
    """Joins entries that share a tensor of either side."""
    groups: dict[tuple[int, str], list[Named]] = {}
    for each in named:
        former = {id(groups[key]): groups[key] for key in enumerate(ends(each)) if key in groups}
        joined = [*(member for group in former.values() for member in group), each]
        for member in joined:
            groups |= dict.fromkeys(enumerate(ends(member)), joined)
    return [*{id(group): group for group in groups.values()}.values()]


def _derive_rule(group: list[Named], shapes: tuple[Shapes, Shapes], derived: Derived) -> None:
    """Adds the rule of some tensors; layers that are built otherwise have rules of their own."""
    alike: dict[object, list[tuple[_Writer, list[Named]]]] = {}
    unlike: list[list[Named]] = []
    for layer in _components(group, lambda each: each.names):
        try:
            writer = _Writer(layer, shapes)
            alike.setdefault(writer.texts(), []).append((writer, layer))
        except Unfit:
            unlike.append(layer)
    usual, *others = sorted(alike.values(), key=len, reverse=True) or [[]]
    unlike += [layer for other in others for _, layer in other]
    try:
        if usual:
            _add_rule([writer for writer, _ in usual], derived)
    except Unfit as error:
        derived.without[group[0].names[REFERENCE]] = str(error)
    for layer in unlike:
        own = [each._replace(patterns=each.names, values={}) for each in layer]
        try:
            _add_rule([_Writer(own, shapes)], derived)
        except Unfit as error:
            derived.without[layer[0].names[REFERENCE]] = str(error)


def _add_rule(writers: "list[_Writer]", derived: Derived) -> None:
    """Adds the rule of like layers; the sizes that shapes may not tell get names of the map's."""
    first = writers[0]
    names: dict[str, str] = {}
    alike = {n for n, size in first.sizes.items() if {w.sizes[n] for w in writers} == {size}}
    keys = [region.key for side in first.axes for axes in side.values() for region in regions(axes)]
    for name in sorted(first.shared & alike):
        stem = name if name in first.words else f"n{first.sizes[name]}"
        beside = {other for key in keys if name in key for other in key}
        taken = {names.get(other, other) for other in beside - {name}}
        names[name] = _new_name(stem, first.sizes[name], derived.sizes, taken)
    letters = iter(
        [letter for letter in LETTERS if letter not in {*first.indices, *names.values()}]
    )
    for name in first.sizes:
        if name not in names and name not in first.words:
            names[name] = next(letters, name)
    sides = [
        {pattern: axes_text(_rename(axes, names)) for pattern, axes in side.items()}
        for side in first.axes
    ]
    equal = [
        tuple(names.get(n, n) for n in group)
        for group in first.equal
        if all(len({writer.lengths[n] for n in group}) == 1 for writer in writers)
    ]
    rule = TensorRule(sides[REFERENCE], sides[PORT], tuple(equal))
    rule.validate()
    derived.rules.append(rule)


def _new_name(stem: str, number: int, sizes: dict[str, int], taken: set[str]) -> str:
    """Names a size that holds for the whole model: one of another number has another name."""
    name, at = stem, 2
    while name in taken or sizes.setdefault(name, number) != number:
        name, at = f"{stem}_{at}", at + 1
    return name


def _rename(x: TensorAxes, names: Mapping[str, str]) -> TensorAxes:
    def node(x: Node) -> Node:
        if isinstance(x, Size):
            return Size(names.get(x.name, x.name), x.backwards)
        if isinstance(x, Product):
            return Product(tuple(map(node, x.factors)))
        if isinstance(x, Sum):
            labels = tuple(names.get(label, label) for label in x.labels)
            return Sum(labels, tuple(map(node, x.parts)))
        return x

    return TensorAxes(tuple(map(node, x.dims)), names.get(x.label, x.label))


def _mark_partial(rules: Iterable[TensorRule], named: Iterable[Named]) -> list[TensorRule]:
    """Marks rules whose tensors not every layer had."""
    have: dict[str, set[frozenset[tuple[str, int]]]] = {}
    for each in named:
        for pattern in each.patterns:
            own = Pattern(pattern).variables
            values = frozenset((k, v) for k, v in each.values.items() if k in own)
            have.setdefault(pattern, set()).add(values)
    every = {values for found in have.values() for values in found}

    def is_partial(text: str) -> bool:
        names = Pattern(text).variables
        wanted = {frozenset(item for item in values if item[0] in names)
                  for values in every if names <= {name for name, _ in values}}  # fmt: skip
        return wanted > have.get(text, wanted)

    return [
        TensorRule(rule.reference, rule.port, rule.equal, any(map(is_partial, rule.reference)))
        for rule in rules
    ]


class _Writer:
    """Writes the axes of tensors that share elements, of one layer.

    An axis is a number of loops. Each has an *atom*, which is a loop on the other side, too.
    """

    def __init__(self, entries: Sequence[Named], shapes: tuple[Shapes, Shapes]) -> None:
        """Raises Unfit where axes cannot describe them."""
        self.counts: list[int] = []  # of each atom
        self.joined: list[int] = []  # another atom that is the same, by atom
        self.indices: dict[str, int] = {}  # the atoms that an index of a name counts
        self.backwards: set[tuple[str, int]] = set()  # patterns and atoms
        self.shapes: tuple[dict[str, Shape], dict[str, Shape]] = ({}, {})
        for each in entries:
            for side in BOTH:
                shape = shapes[side][each.names[side]]
                if self.shapes[side].setdefault(each.patterns[side], shape) != shape:
                    raise Unfit(f"{each.patterns[side]} has unlike shapes")
        groups: dict[object, list[Named]] = {}
        for each in entries:
            alike = each.patterns, *(part.shape for part in each.parts), each.order
            groups.setdefault(alike, []).append(each)
        groups_of_blocks = [each for group in groups.values() for each in self._divide(group)]
        self.blocks = [self._block(at, group) for at, group in enumerate(groups_of_blocks)]
        self.words = _label_blocks([block.patterns for block in self.blocks])
        self._trees()  # joins atoms
        trees = self._trees()
        self.names = self._name_atoms(trees)
        self.axes = [
            {
                pattern: _rename(TensorAxes(tuple(dims), self._label(side, pattern)), self.names)
                for pattern, dims in trees[side].items()
            }
            for side in BOTH
        ]
        self.sizes = {name: self.counts[int(atom)] for atom, name in self.names.items()
                      if name not in self.indices}  # fmt: skip
        dims = [dim for side in self.axes for axes in side.values() for dim in axes.dims]
        self.shared = {name for dim in dims if not isinstance(dim, Size) for name in names_in(dim)}
        self.shared &= {*self.sizes}
        self.lengths = dict(self.sizes)  # also of parts, by their labels
        self.equal = self._find_equal()

    def texts(self) -> tuple[tuple[tuple[str, str], ...], ...]:
        return tuple(tuple((p, axes_text(a)) for p, a in side.items()) for side in self.axes)

    # --- blocks

    def _divide(self, group: list[Named]) -> list[list[Named]]:
        """Takes blocks one by one, such as the gates of a cell, where they are in no one loop."""
        starts = _starts(group)
        first, *_ = starts.values()
        is_place = not all(box.stays for part in group[0].parts for box in part.boxes)
        try:
            if len(_fit_loops([start for start, _ in first])[1]) < 2 or is_place:
                return [group]
        except Unfit:
            pass
        if len(first) > MOST_PARTS or any(len(found) != len(first) for found in starts.values()):
            return [group]
        return [[found[at][1] for found in starts.values()] for at in range(len(first))]

    def _block(self, at: int, group: Sequence[Named]) -> Overlap:
        """Joins parts that stand in a regular grid."""
        boxes = [[box for part in each.parts for box in part.boxes] for each in group]
        if any([box[1:] for box in each] != [box[1:] for box in boxes[0]] for each in boxes):
            raise Unfit("its parts have unlike steps")
        names = sorted(group[0].values)
        starts = {place: [start for start, _ in found] for place, found in _starts(group).items()}
        origin, loops = _fit_loops(next(iter(starts.values())))
        digits: list[list[Digit]] = [[] for _ in origin]
        every = [(self._atom(count), count, step) for count, step in loops]
        every += self._index_loops(names, starts)
        for atom, count, step in every:
            for axis, stride in enumerate(step):
                digits[axis] += [Digit(atom, count, stride)] if stride else []
        for axis, inner in enumerate(self._inner(group[0])):
            digits[axis] += inner
        strips = [Strip(at, *each) for each in zip(origin, map(tuple, digits))]
        axes = len(group[0].parts[REFERENCE].boxes)
        return Overlap(group[0].patterns, (strips[:axes], strips[axes:]))

    def _index_loops(
        self, names: Sequence[str], starts: Mapping[tuple[int, ...], list[Steps]]
    ) -> list[tuple[int, int, Steps]]:
        """Finds how each index moves the starts."""
        origin = next(iter(starts))
        steps: list[Steps] = []
        for at in range(len(names)):
            moved = [p for p in starts if p[at] != origin[at]
                     and p[:at] + p[at + 1 :] == origin[:at] + origin[at + 1 :]]  # fmt: skip
            by = moved[0][at] - origin[at] if moved else 1
            ends = starts[origin][0], starts[moved[0]][0] if moved else starts[origin][0]
            steps.append(tuple((b - a) // by for a, b in zip(*ends)))
        for place, found in starts.items():
            by_axis = zip(*([(v - o) * x for x in s] for v, o, s in zip(place, origin, steps)))
            shift = [sum(each) for each in by_axis] or [0] * len(found[0])
            if found != sorted(tuple(x + d for x, d in zip(each, shift))
                               for each in starts[origin]):  # fmt: skip
                raise Unfit("its layers stand in no regular order")
        loops = []
        for at, (name, step) in enumerate(zip(names, steps)):
            numbers = {place[at] for place in starts}
            if any(step):
                if numbers != {*range(len(numbers))}:
                    raise Unfit(f"{name} does not count from 0")
                atom = self.indices.setdefault(name, len(self.counts))
                if atom == len(self.counts):
                    self._atom(len(numbers))
                loops.append((atom, len(numbers), step))
        return loops

    def _inner(self, named: Named) -> list[list[Digit]]:
        """Makes the loops inside a part, by axis of the reference, then of the port."""
        stays = [[axis for axis, box in enumerate(part.boxes) if box.stays] for part in named.parts]
        loops: list[list[tuple[int, int]]] = [[] for part in named.parts for _ in part.boxes]
        r_part, p_part = named.parts
        permuted = [r_part.shape[axis] for axis in named.order]
        for r, p, count in _common_factors(permuted, p_part.shape):
            atom = self._atom(count)
            loops[stays[REFERENCE][named.order[r]]].append((atom, count))
            loops[len(r_part.boxes) + stays[PORT][p]].append((atom, count))
        digits: list[list[Digit]] = []
        for own, box in zip(loops, [*r_part.boxes, *p_part.boxes]):
            stride, found = box.step, []
            for atom, count in reversed(own):
                found.append(Digit(atom, count, stride))
                stride *= count
            digits.append(found)
        return digits

    def _atom(self, count: int) -> int:
        self.counts.append(count)
        self.joined.append(len(self.joined))
        return len(self.joined) - 1

    def _root(self, atom: int) -> int:
        while self.joined[atom] != atom:
            atom = self.joined[atom]
        return atom

    # --- axes

    def _trees(self) -> list[dict[str, list[Node]]]:
        """Writes all axes; the names of sizes are numbers of atoms."""
        self.labels: list[tuple[int, int, str, Node]] = []  # side, block, label, part
        return [
            {
                pattern: [
                    self._express(n, [b.strips[side][axis] for b in self.blocks
                                      if b.patterns[side] == pattern], side, pattern)
                    for axis, n in enumerate(shape)
                ]
                for pattern, shape in self.shapes[side].items()
            }
            for side in BOTH
        ]  # fmt: skip

    def _express(self, n: int, strips: list[Strip], side: int, pattern: str) -> Node:
        """Writes n places along an axis: parts that follow one another, or a loop."""
        strips = [self._forward(strip, pattern) for strip in strips]
        chunks: list[tuple[int, int, list[Strip]]] = []
        for strip in sorted(strips, key=lambda each: each.start):
            end = strip.start + 1 + sum((d.times - 1) * d.stride for d in strip.digits)
            if chunks and strip.start < chunks[-1][1]:
                start, last, own = chunks[-1]
                chunks[-1] = start, max(last, end), [*own, strip]
            else:
                chunks.append((strip.start, end, [strip]))
        if len(chunks) < 2:
            return self._loop(n, strips, side, pattern)
        if [0, *(end for _, end, _ in chunks)] != [*(start for start, *_ in chunks), n]:
            return self._loop(n, strips, side, pattern)
        labels, parts = [], []
        for start, end, own in chunks:
            moved = [strip._replace(start=strip.start - start) for strip in own]
            parts.append(self._express(end - start, moved, side, pattern))
            labels.append(self.words[min(strip.block for strip in own)])
            self.labels += [(side, strip.block, labels[-1], parts[-1]) for strip in own]
        if len({*labels}) < len(labels):
            raise Unfit("its parts cannot be told apart")
        return Sum(tuple(labels), tuple(parts))

    def _loop(self, n: int, strips: list[Strip], side: int, pattern: str) -> Node:
        """Takes off the slowest loop, which all blocks share."""
        if n == 1 and not any(strip.digits or strip.start for strip in strips):
            return Unit()
        tops = [strip.digits[0] for strip in strips if strip.digits]
        if len(tops) < max(len(strips), 1) or tops[0].times * tops[0].stride != n:
            raise Unfit("a part of it has no partner, or its parts stand in no regular order")
        first, roots = tops[0], {self._root(top.atom) for top in tops}
        if any(top[1:] != first[1:] for top in tops):
            raise Unfit("its parts have unlike loops")
        kept = min(roots, key=lambda root: (root not in self.indices.values(), root))
        for root in roots:
            self.joined[root] = kept
        rest = [strip._replace(digits=strip.digits[1:]) for strip in strips]
        size = Size(str(kept), (pattern, first.atom) in self.backwards)
        if first.stride == 1 and not any(strip.digits or strip.start for strip in rest):
            return size
        inner = self._express(first.stride, rest, side, pattern)
        return Product((size, *(inner.factors if isinstance(inner, Product) else (inner,))))

    def _forward(self, strip: Strip, pattern: str) -> Strip:
        """Turns loops that run backwards, and notes them; the slowest loop comes first."""
        start, digits = strip.start, []
        for atom, count, stride in strip.digits:
            if stride < 0:
                start += (count - 1) * stride
                self.backwards.add((pattern, atom))
            digits.append(Digit(atom, count, abs(stride)))
        digits.sort(key=lambda digit: (-digit.stride, -digit.times))
        return Strip(strip.block, start, tuple(digits))

    # --- names

    def _name_atoms(self, trees: list[dict[str, list[Node]]]) -> dict[str, str]:
        """Names atoms: by an index, by the part that they are, or by a letter."""
        names = {str(self._root(atom)): name for name, atom in self.indices.items()}
        users = [{str(self._root(d.atom)) for side in block.strips for s in side for d in s.digits}
                 for block in self.blocks]  # fmt: skip
        for _, _, label, node in self.labels:
            if isinstance(node, Size) and node.name not in names:
                owners = {block for _, block, each, part in self.labels
                          if each == label and part == node}  # fmt: skip
                if {at for at, used in enumerate(users) if node.name in used} <= owners:
                    names[node.name] = label
        taken = {*self.words, *self.indices}
        letters = iter([letter for letter in LETTERS if letter not in taken])
        for side in trees:
            for atom in (atom for dims in side.values() for dim in dims for atom in names_in(dim)):
                if atom not in names:
                    names[atom] = next(letters, f"axis{atom}")
        return names

    def _label(self, side: int, pattern: str) -> str:
        """Finds the label of a tensor that is a part of another's, where no size is its name."""
        own = {at for at, block in enumerate(self.blocks) if block.patterns[side] == pattern}
        here = {label for s, at, label, _ in self.labels if s == side and at in own}
        there = {label for s, at, label, _ in self.labels if s != side and at in own}
        needed = there - here - {*self.names.values()}
        if len(needed) > 1:
            raise Unfit("its parts cannot be told apart")
        return next(iter(needed), "")

    def _find_equal(self) -> list[tuple[str, ...]]:
        """Lists the parts of equal lengths, and the tensor's other axes of this number: parts of
        unlike sizes are then refused."""
        found = []
        counts = {name: self.counts[int(atom)] for atom, name in self.names.items()}
        for axes in (axes for side in self.axes for axes in side.values()):
            whole = [dim.name for dim in axes.dims if isinstance(dim, Size)]
            for each in (each for dim in axes.dims for each in sums_in(dim)):
                numbers: dict[int, list[str]] = {}
                for label, part in zip(each.labels, each.parts):
                    self.lengths[label] = length(part, counts)
                    if not isinstance(part, Unit):
                        numbers.setdefault(self.lengths[label], []).append(label)
                found += [(*group, *(n for n in whole if self.sizes.get(n) == number))
                          for number, group in numbers.items() if len(group) > 1]  # fmt: skip
        return [*{frozenset(group): group for group in reversed(found)}.values()]


def _label_blocks(patterns: Sequence[tuple[str, str]]) -> list[str]:
    """Names each block by the word in which its tensor's name differs from the others'."""
    for side in (PORT, REFERENCE):
        names = [re.split(r"[.{},/]+", each[side]) for each in patterns]
        for words in zip(*names) if len({*map(len, names)}) == 1 else ():
            if len({*words}) == len(words) and all(re.fullmatch(NAME, word) for word in words):
                return [*words]
    return [f"part{at}" for at in range(len(patterns))]


def _starts(group: Iterable[Named]) -> dict[tuple[int, ...], list[tuple[Steps, Named]]]:
    """Tells by the values of indices where parts start, in both tensors, in ascending order."""
    found: dict[tuple[int, ...], list[tuple[Steps, Named]]] = {}
    for each in group:
        place = tuple(each.values[name] for name in sorted(each.values))
        start = tuple(box.start for part in each.parts for box in part.boxes)
        found.setdefault(place, []).append((start, each))
    return {place: sorted(own, key=lambda x: x[0]) for place, own in sorted(found.items())}


def _fit_loops(starts: Sequence[Steps]) -> tuple[Steps, list[tuple[int, Steps]]]:
    """Finds the loops that give starts in ascending order: count and step, the slowest first."""
    if len(starts) == 1:
        return starts[0], []
    apart = [tuple(b - a for a, b in zip(*pair)) for pair in itertools.pairwise(starts)]
    run = next((at for at, step in enumerate(apart) if step != apart[0]), len(apart)) + 1
    inside = [step for at, step in enumerate(apart) if (at + 1) % run]
    if len(starts) % run or any(step != apart[0] for step in inside):
        raise Unfit("its parts stand in no regular order")
    origin, outer = _fit_loops(starts[::run])
    return origin, [*outer, (run, apart[0])]


def _common_factors(a: Sequence[int], b: Sequence[int]) -> list[tuple[int, int, int]]:
    """Splits two shapes of as many elements into common factors: axis of a, axis of b, count."""
    if [*a] == [*b]:
        return [(at, at, n) for at, n in enumerate(a)]
    found = []
    left, right = ([[at, n] for at, n in enumerate(each) if n != 1] for each in (a, b))
    while left and right:
        n = min(left[0][1], right[0][1])
        if left[0][1] % n or right[0][1] % n:
            raise Unfit("its axes are regrouped in no regular way")
        found.append((left[0][0], right[0][0], n))
        for each in (left, right):
            each[0][1] //= n
            if each[0][1] == 1:
                each.pop(0)
    return found
