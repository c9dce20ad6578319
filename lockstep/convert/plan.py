"""From the rules of a map and the tensors at hand: which block of which tensor goes where.

A name has indices in braces: `{layer}`, `{2*layer+1}`, or `{stage,layer}`, which counts the pairs
(stage, layer) that there are, in order.

Needs numpy alone: `lockstep convert --script` copies this file.
"""

import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np

from lockstep.convert.axes import (
    NAME,
    Node,
    Region,
    Size,
    Sizes,
    TensorAxes,
    Unfit,
    length,
    names_in,
    names_of,
    paired_views,
    parse_axes,
    parts_of,
    regions,
    shape_of,
    solve,
)

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
SIDES = ("reference", "port")
AFFINE = re.compile(rf"(?:(\d+)\*)?({NAME})(?:\+(\d+))?")
DIGITS = r"(0|[1-9]\d*)"


@dataclass(frozen=True)
class Index:
    """An index of a name: factor * variable + offset, or the number of a tuple among those there.

    Attributes:
        counted: what a tuple is of, variables and numbers; empty for the other kind.
        prefix: the pattern before it, by which its tuples are told from others.
    """

    variable: str = ""
    factor: int = 1
    offset: int = 0
    counted: tuple[str | int, ...] = ()
    prefix: str = ""

    @property
    def variables(self) -> list[str]:
        return [x for x in self.counted if isinstance(x, str)] or [self.variable]


@dataclass(frozen=True)
class Pattern:
    """A tensor's name with indices."""

    text: str

    @cached_property
    def parts(self) -> tuple[str | Index, ...]:
        """Splits it. Raises Unfit where it is malformed."""
        parts: list[str | Index] = []
        before = ""
        for at, piece in enumerate(re.split(r"\{([^{}]*)\}", self.text)):
            if at % 2 == 0:
                if {"{", "}"} & {*piece}:
                    raise Unfit(f"{self.text}: has a brace without its other")
                parts.append(piece)
                before += piece
                continue
            words = [word.strip() for word in piece.split(",")]
            found = AFFINE.fullmatch(words[0])
            if len(words) > 1 and all(re.fullmatch(rf"{NAME}|\d+", word) for word in words):
                counted = tuple(int(word) if word.isdigit() else word for word in words)
                parts.append(Index(counted=counted, prefix=before))
            elif len(words) == 1 and found and int(found[1] or 1):
                parts.append(Index(found[2], int(found[1] or 1), int(found[3] or 0)))
            else:
                raise Unfit(f"{self.text}: {{{piece}}} is no index; see docs/convert.md")
            before += "{}"
        return tuple(parts)

    @cached_property
    def indices(self) -> list[Index]:
        return [part for part in self.parts if isinstance(part, Index)]

    @cached_property
    def variables(self) -> frozenset[str]:
        return frozenset(name for index in self.indices for name in index.variables)

    @cached_property
    def skeleton(self) -> str:
        """Returns the name without its numbers."""
        return _without_numbers("".join("0" if isinstance(p, Index) else p for p in self.parts))

    @cached_property
    def _expression(self) -> re.Pattern[str]:
        return re.compile(
            "".join(DIGITS if isinstance(p, Index) else re.escape(p) for p in self.parts)
        )

    def match(self, name: str, counts: "Counts") -> dict[str, int] | None:
        """Reads the variables from a name; None where the name is another."""
        found = self._expression.fullmatch(name)
        if not found:
            return None
        values: dict[str, int] = {}
        for index, text in zip(self.indices, found.groups()):
            if len(text) > 9:
                return None
            new = _solve_index(index, int(text), counts)
            if new is None or any(values.get(key, value) != value for key, value in new.items()):
                return None
            values |= new
        return values

    def format(self, values: Mapping[str, int], counts: "Counts") -> str:
        """Writes the name. Raises Unfit where a counted tuple is not there."""
        return "".join(
            part if isinstance(part, str) else str(_index_value(part, values, counts))
            for part in self.parts
        )


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "0", name)


Counts = dict[str, list[tuple[int, ...]]]  # by an index's prefix: the tuples that there are, sorted


def _tuple_of(index: Index, values: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(values[x] if isinstance(x, str) else x for x in index.counted)


def _index_value(index: Index, values: Mapping[str, int], counts: Counts) -> int:
    if not index.counted:
        return index.factor * values[index.variable] + index.offset
    return counts[index.prefix].index(_tuple_of(index, values))


def _solve_index(index: Index, number: int, counts: Counts) -> dict[str, int] | None:
    if not index.counted:
        value, rest = divmod(number - index.offset, index.factor)
        return None if rest or value < 0 else {index.variable: value}
    there = counts.get(index.prefix, [])
    if number >= len(there):
        return None
    values: dict[str, int] = {}
    for each, value in zip(index.counted, there[number]):
        if values.setdefault(str(each), value if isinstance(each, str) else each) != value:
            return None
    return {name: value for name, value in values.items() if not name.isdigit()}


@dataclass(frozen=True)
class TensorRule:
    """Tensors of the reference, and those of the port that hold the same elements.

    Attributes:
        reference, port: a name's pattern -> its axes.
        equal: groups of sizes, and of labels of parts, that were proved for equal numbers alone.
        some: some layers had none of these when the map was proved.
    """

    reference: Mapping[str, str]
    port: Mapping[str, str]
    equal: Sequence[Sequence[str]] = ()
    some: bool = False

    def __str__(self) -> str:
        return f"{', '.join(self.reference)} <-> {', '.join(self.port)}"

    def axes_text(self, *, back: bool) -> Mapping[str, str]:
        """Returns names and axes of the side that is converted."""
        return self.port if back else self.reference

    def axes(self, side: str) -> dict[Pattern, TensorAxes]:
        return {_pattern(text): parse_axes(axes) for text, axes in getattr(self, side).items()}

    def indices(self, side: str) -> set[str]:
        """Returns the variables in the names of one side."""
        return {name for pattern in self.axes(side) for name in pattern.variables}

    def stacked(self, side: str) -> set[str]:
        """Returns the variables in the names of a side that are axes on the other."""
        other = SIDES[side == SIDES[0]]
        return self.indices(side) - self.indices(other)

    @property
    def sizes(self) -> set[str]:
        """Returns the names of all sizes, and of indices that are axes."""
        every = [axes for side in SIDES for axes in self.axes(side).values()]
        return {name for axes in every for name in names_of(axes)}

    @property
    def names(self) -> set[str]:
        """Returns the names of all sizes and indices."""
        return self.sizes | self.indices(SIDES[0]) | self.indices(SIDES[1])

    def blocks(self, side: str) -> list[tuple[frozenset[str], Pattern, Region]]:
        """Lists the regions of a side, with the key that the same elements have on the other."""
        stacked = self.stacked(side)
        return [
            (region.key | (stacked & pattern.variables), pattern, region)
            for pattern, axes in self.axes(side).items()
            for region in regions(axes)
        ]

    @cached_property
    def parts(self) -> dict[str, Node]:
        """Returns the parts of all sums by their labels."""
        every = [axes for side in SIDES for axes in self.axes(side).values()]
        return {label: part for axes in every for label, part in parts_of(axes).items()}

    @cached_property
    def alias(self) -> dict[str, str]:
        """Maps the sizes of equal parts to the first of them.

        Other sizes of a group follow from shapes, and must then be equal to these.
        """
        found: dict[str, str] = {}
        for group in self.equal:
            sizes = [name for name in group if self.parts.get(name) == Size(name)]
            found |= dict.fromkeys(sizes, sizes[0]) if sizes else {}
        return found

    def require_equal(self, sizes: Sizes) -> None:
        """Raises Unfit where sizes differ that were proved for equal numbers alone.

        Args:
            sizes: those that are known.
        """
        for group in self.equal:
            nodes = {name: self.parts.get(name, Size(name)) for name in group}
            lengths = {name: length(node, sizes) for name, node in nodes.items()
                       if {*names_in(node)} <= {*sizes}}  # fmt: skip
            if len({*lengths.values()}) > 1:
                found = ", ".join(f"{name}={n}" for name, n in lengths.items())
                raise Unfit(
                    f"{self}: {found}, but {' = '.join(group)} was proved for equal numbers alone; "
                    "prove it with others, and save the map again"
                )

    def validate(self) -> None:
        """Raises Unfit unless both sides hold the same elements."""
        keys = {side: {key for key, *_ in self.blocks(side)} for side in SIDES}
        for name in (name for group in self.equal for name in group):
            if name not in self.names | {*self.parts}:
                raise Unfit(f"{self}: equal has {name}, which is no size and no part")
        for side, other in (SIDES, SIDES[::-1]):
            for key in keys[side] - keys[other]:
                what = " ".join(sorted(key)) or "a number"
                raise Unfit(f"{self}: the {side} has the block of {what}, the {other} has not")
            for pattern, axes in self.axes(side).items():
                if pattern.variables & names_of(axes):
                    raise Unfit(f"{self}: a size of {pattern.text} is also its index")


@cache
def _pattern(text: str) -> Pattern:
    return Pattern(text)


@dataclass(frozen=True)
class Copy:
    """One block of a source's tensor, for one of a target's."""

    source: str
    regions: tuple[Region, Region]
    sizes: Sizes
    places: Sizes

    def views(self, source: Any, target: Any) -> tuple[np.ndarray, np.ndarray]:
        return paired_views(source, target, self.regions, self.sizes, self.places)


@dataclass
class Plan:
    """The steps of a conversion, before a byte is read.

    Attributes:
        shapes: of the target's tensors, in the order of the source's.
        copies: the blocks of each; of several that are the same block, all but the first are in
            `same`.
        same: blocks that must hold what the target then holds.
        twins: another name in the source -> the tensor of the source that must be equal to it.
        unused: the source's tensors that the map says need no partner.
        tied: another name in the target -> the tensor that it has.
        sizes: what was solved for the sizes that hold for the whole model.
    """

    shapes: dict[str, Shape] = field(default_factory=dict)
    copies: dict[str, list[Copy]] = field(default_factory=dict)
    same: dict[str, list[Copy]] = field(default_factory=dict)
    twins: dict[str, str] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    tied: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)


def make_plan(
    rules: Sequence[TensorRule], source: Shapes, *, back: bool = False,
    wanted: Shapes | None = None,
    sizes: Mapping[str, Any] | None = None, shared: Sequence[str] = (),
    tied: Mapping[str, Mapping[str, str]] | None = None,
    unused: Mapping[str, Sequence[str]] | None = None,
    unfilled: Mapping[str, Sequence[str]] | None = None,
) -> Plan:  # fmt: skip
    """Applies rules to a source's tensors.

    Args:
        source: names and shapes; of the port if `back`, else of the reference.
        wanted: names and shapes of the target, where they are known.
        sizes: sizes that are given by name; a list of numbers for a counted index.
        shared: the names of sizes that hold for the whole model; all others are a tensor's own.
        tied: by side, other names of tensors.
        unused: by side, names of tensors that need no partner, with {i} for a number and * for
            any text.
        unfilled: by side, tensors that had no partner when the map was proved.

    Raises:
        Unfit: a tensor is missing or left over, or a size does not follow from the shapes.
    """
    here, there = SIDES[::-1] if back else SIDES
    files: dict[str, str] = {}  # a tensor's name in the rules -> in the source
    twins: dict[str, str] = {}
    for other, name in (tied or {}).get(here, {}).items():
        if other in source and name in source:
            twins[other] = name
        elif other in source:
            files[name] = other
    renamed = {other: name for name, other in files.items()}
    named = {renamed.get(n, n): shape for n, shape in source.items() if n not in twins}
    planner = _Planner(rules, named, wanted, here, there, sizes or {})
    plan = planner.plan
    plan.twins = twins
    instances = planner.match((unused or {}).get(here, ()))
    planner.solve_sizes(instances, {*shared})
    for instance in instances:
        planner.add_targets(instance, files)
    order = {name: at for at, name in enumerate(source)}
    first = {name: order[copies[0].source] for name, copies in plan.copies.items()}
    plan.shapes = dict(sorted(plan.shapes.items(), key=lambda each: first[each[0]]))
    others = (tied or {}).get(there, {})
    plan.tied = {other: name for other, name in others.items() if name in plan.shapes}
    idle, alone = ((sides or {}).get(there, ()) for sides in (unused, unfilled))
    for name in (*alone, *(wanted or {})):
        if name not in plan.shapes and name not in plan.tied and not _is_idle(name, idle):
            raise Unfit(f"{name}: the target has it, and the map does not fill it; add a rule, or "
                        f'add its name to "unused"')  # fmt: skip
    for name, shape in plan.shapes.items():
        found = shape if wanted is None else wanted.get(name)
        if found is None:
            raise Unfit(f"{name}: the target has no such tensor")
        if shape != tuple(found):
            raise Unfit(f"{name}: would be {list(shape)}, the target has {list(found)}")
    return plan


def plan_same(shapes: Shapes) -> Plan:
    """Plans a copy of all tensors, with their names and shapes."""
    plan = Plan(dict(shapes))
    for name, shape in shapes.items():
        sizes = {f"axis{at}": n for at, n in enumerate(shape)}
        region = Region(frozenset(sizes), tuple(map(Size, sizes)))
        plan.copies[name] = [Copy(name, (region, region), sizes, {})]
        plan.same[name] = []
    return plan


def _is_idle(name: str, unused: Sequence[str]) -> bool:
    return any(fnmatchcase(name, text) or _pattern(text).match(name, {}) is not None
               for text in unused)  # fmt: skip


@dataclass
class _Instance:
    """A rule with its indices: one layer's, say."""

    rule: TensorRule
    fixed: dict[str, int]
    names: dict[Pattern, dict[tuple[int, ...], str]]  # the source's, by stacked variables
    sizes: dict[str, int]


class _Owner(NamedTuple):
    """The rule of a tensor of the source, and the indices in its name."""

    number: int
    pattern: Pattern
    values: dict[str, int]


class _Planner:
    """Applies rules in one direction: from `here` to `there`."""

    def __init__(
        self, rules: Sequence[TensorRule], source: Shapes, wanted: Shapes | None, here: str,
        there: str, given: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self.rules, self.source, self.wanted = rules, source, wanted
        self.here, self.there = here, there
        self.counts: Counts = {}
        for rule in rules:
            self._count(rule, there, here, source, given)
            self._count(rule, here, there, wanted or {}, given)
        self.counts = {prefix: sorted({*tuples}) for prefix, tuples in self.counts.items()}
        self.plan = Plan(sizes={name: n for name, n in given.items() if isinstance(n, int)})

    def _count(
        self, rule: TensorRule, counting: str, plain: str, names: Shapes, given: Mapping[str, Any]
    ) -> None:
        """Finds the tuples of counted indices, from the names that have them one by one."""
        indices = {i for pattern in rule.axes(counting) for i in pattern.indices if i.counted}
        matches = [
            values
            for pattern in (rule.axes(plain) if indices else ())
            for values in (pattern.match(name, {}) for name in names)
            if values is not None
        ]
        for index in indices:
            found = self.counts.setdefault(index.prefix, [])
            found += [_tuple_of(index, v) for v in matches if {*index.variables} <= {*v}]
            listed, last = given.get(index.variables[-1]), index.counted[-1]
            if isinstance(listed, list) and len(index.counted) == 2 and not names:
                found += [(i, j) for i, n in enumerate(listed) for j in range(n)]
            elif counting == self.here and not names and isinstance(last, str):
                raise Unfit(f"{rule}: give the number of each {last}, such as --size "
                            f"{last}=3,4,6,3, or --like FILE")  # fmt: skip

    def match(self, unused: Sequence[str]) -> list[_Instance]:
        """Finds the source's tensors of each rule."""
        owners = self._find_owners()
        rest = [name for name in self.source if name not in owners]
        instances: dict[tuple[int, tuple[tuple[str, int], ...]], _Instance] = {}
        for name, (number, pattern, values) in owners.items():
            rule = self.rules[number]
            stacked = rule.stacked(self.here)
            fixed = {key: value for key, value in values.items() if key not in stacked}
            place = tuple(values[key] for key in sorted(stacked & pattern.variables))
            key = number, tuple(sorted(fixed.items()))
            instance = instances.setdefault(key, _Instance(rule, fixed, {}, {}))
            instance.names.setdefault(pattern, {})[place] = name
        try:
            self._require_complete(owners.values())
        except Unfit as error:
            told = f"; it has {rest[0]}, which the map has not" if rest else ""
            raise Unfit(f"{error}{told}") from None
        for instance in instances.values():
            self._require_whole(instance)
        self.plan.unused = [name for name in rest if _is_idle(name, unused)]
        for name in rest:
            if name not in self.plan.unused:
                raise Unfit(f"{name}: the map does not say where it goes; add a rule, or add its "
                            f'name to "unused"')  # fmt: skip
        return [instances[key] for key in sorted(instances)]

    def _find_owners(self) -> dict[str, _Owner]:
        """Finds the rule of each tensor: of several, that with the fewest indices."""
        by_skeleton: dict[str, list[tuple[int, Pattern]]] = {}
        for number, rule in enumerate(self.rules):
            for pattern in rule.axes(self.here):
                by_skeleton.setdefault(pattern.skeleton, []).append((number, pattern))
        owners = {}
        for name in self.source:
            found = [
                _Owner(number, pattern, values)
                for number, pattern in by_skeleton.get(_without_numbers(name), [])
                if (values := pattern.match(name, self.counts)) is not None
            ]
            fewest = min((len(owner.values) for owner in found), default=0)
            best = [owner for owner in found if len(owner.values) == fewest]
            if len(best) > 1:
                raise Unfit(f"{name}: the map has two rules for it")
            if best:
                owners[name] = best[0]
        return owners

    def _require_complete(self, owners: Collection[_Owner]) -> None:
        """Raises Unfit where a layer lacks a tensor: indices of one name have the same values in
        all names, as when the map was proved."""
        have: dict[tuple[int, Pattern], set[tuple[tuple[str, int], ...]]] = {}
        every: dict[frozenset[str], set[tuple[tuple[str, int], ...]]] = {}
        for number, pattern, values in owners:
            items = tuple(sorted(values.items()))
            have.setdefault((number, pattern), set()).add(items)
            every.setdefault(pattern.variables, set()).add(items)
        for number, rule in enumerate(self.rules):
            patterns = [pattern for pattern in rule.axes(self.here) if (number, pattern) in have]
            for pattern in patterns or [*rule.axes(self.here)][:1]:
                wanted = {tuple(item for item in values if item[0] in pattern.variables)
                          for names, them in every.items() if pattern.variables <= names
                          for values in them}  # fmt: skip
                missing = sorted((wanted or {()}) - have.get((number, pattern), set()))
                if missing and not rule.some and (self.wanted is None or not patterns):
                    raise Unfit(f"{self._show(pattern, dict(missing[0]))}: the source has no such "
                                "tensor")  # fmt: skip

    def _require_whole(self, instance: _Instance) -> None:
        """Raises Unfit where a tensor of a rule is not there, unless another is its copy."""
        rule, stacked = instance.rule, instance.rule.stacked(self.here)
        blocks = rule.blocks(self.here)
        there_are = {key for key, pattern, _ in blocks if pattern in instance.names}
        for pattern in rule.axes(self.here):
            keys = {key for key, each, _ in blocks if each == pattern}
            if pattern not in instance.names and not keys <= there_are:
                shown = self._show(pattern, instance.fixed)
                raise Unfit(f"{shown}: the source has no such tensor")
        for pattern, names in instance.names.items():
            own = sorted(stacked & pattern.variables)
            for at, variable in enumerate(own):
                n = len({place[at] for place in names})
                if instance.sizes.setdefault(variable, n) != n:
                    raise Unfit(f"{pattern.text}: has {n} of {variable}, and another tensor of its "
                                f"rule {instance.sizes[variable]}")  # fmt: skip
            for place in itertools.product(*(range(instance.sizes[v]) for v in own)):
                if place not in names:
                    shown = self._show(pattern, {**instance.fixed, **dict(zip(own, place))})
                    raise Unfit(f"{shown}: the source has no such tensor, but later ones")

    def _show(self, pattern: Pattern, values: Mapping[str, int]) -> str:
        try:
            return pattern.format(values, self.counts)
        except (KeyError, ValueError):
            return pattern.text

    def solve_sizes(self, instances: Sequence[_Instance], shared: set[str]) -> None:
        """Solves the sizes of all rules from the shapes at hand, and those that are given."""
        plan = self.plan
        left = [(each, *tensor) for each in instances for tensor in self._at_hand(each)]
        for instance in instances:
            instance.rule.require_equal(plan.sizes)
            for name, size in plan.sizes.items():
                one = instance.rule.alias.get(name, name)
                if instance.sizes.setdefault(one, size) != size:
                    raise Unfit(f"{instance.rule}: {name} is {instance.sizes[one]}, not {size}")
        for _, where, axes, shape in left:
            if len(shape) != len(axes.dims):
                raise Unfit(f"{where}: has {len(shape)} axes, the map says {len(axes.dims)}")
        first: dict[str, str] = {}  # where a shared size was solved
        known = -1
        while left and known < (known := sum(len(each.sizes) for each in instances)):
            left = [each for each in left if not self._solve_shape(*each, shared, first)]
        for instance in instances:
            alias = instance.rule.alias
            instance.sizes |= {
                name: instance.sizes[one] for name, one in alias.items() if one in instance.sizes
            }
            unknown = instance.rule.sizes - {*instance.sizes} - {*instance.fixed}
            if lacking := sorted({alias.get(name, name) for name in unknown}):
                words = " ".join(f"--size {name}=N" for name in lacking)
                some = "one or more of " if len(lacking) > 1 else ""
                raise Unfit(f"{instance.rule}: the shapes at hand do not tell {', '.join(lacking)};"
                            f" give {some}{words}, or --like FILE")  # fmt: skip
            instance.rule.require_equal(instance.sizes)

    def _solve_shape(
        self, instance: _Instance, where: str, axes: TensorAxes, shape: Shape, shared: set[str],
        first: dict[str, str],
    ) -> bool:  # fmt: skip
        """Solves what one tensor's shape tells; says if all of its sizes are known then."""
        plan, known, alias = self.plan, instance.sizes, instance.rule.alias
        known |= {name: size for name, size in plan.sizes.items() if name not in known}
        for dim, total in zip(axes.dims, shape):
            try:
                name = solve(dim, total, known, alias)
            except Unfit as error:
                told = [f"{n} is of {first[n]}" for n in known if n in names_of(axes) & {*first}]
                told += [f"{' = '.join(group)} was proved for equal numbers alone"
                         for group in instance.rule.equal
                         if {*group} & names_of(axes)]  # fmt: skip
                raise Unfit("; ".join([f"{where}: {error}", *told])) from None
            if name in shared:
                plan.sizes[name], first[name] = known[name], where
        return {alias.get(n, n) for n in names_of(axes)} <= {*known}

    def _at_hand(self, instance: _Instance) -> Iterator[tuple[str, TensorAxes, Shape]]:
        """Yields names, axes and shapes of an instance's tensors, of the target too where known."""
        rule = instance.rule
        for pattern, axes in rule.axes(self.here).items():
            for name in instance.names.get(pattern, {}).values():
                yield name, axes, self.source[name]
        if self.wanted is None:
            return
        stacked = rule.stacked(self.there)
        for pattern, axes in rule.axes(self.there).items():
            plain = not any(index.counted for index in pattern.indices) and not stacked
            names = [pattern.format(instance.fixed, self.counts)] if plain else [*self.wanted]
            for name in names:
                values = pattern.match(name, self.counts) if name in self.wanted else None
                if values is None or any(instance.fixed.get(k, v) != v for k, v in values.items()):
                    continue
                for variable in stacked & {*values}:
                    n = max(instance.sizes.get(variable, 0), values[variable] + 1)
                    instance.sizes[variable] = n
                yield name, axes, self.wanted[name]

    def add_targets(self, instance: _Instance, files: Mapping[str, str]) -> None:
        """Adds the target's tensors of a rule, and their blocks."""
        rule, plan = instance.rule, self.plan
        sources: dict[frozenset[str], list[tuple[Pattern, Region]]] = {}
        for key, pattern, region in rule.blocks(self.here):
            if pattern in instance.names:
                sources.setdefault(key, []).append((pattern, region))
        unstacked, stacked = rule.stacked(self.there), rule.stacked(self.here)
        for pattern, axes in rule.axes(self.there).items():
            own = sorted(unstacked & pattern.variables)
            for place in itertools.product(*(range(instance.sizes[name]) for name in own)):
                at = dict(zip(own, place))
                name = pattern.format({**instance.fixed, **at}, self.counts)
                if name in plan.shapes:
                    raise Unfit(f"{name}: the map fills it twice")
                plan.shapes[name] = shape_of(axes, instance.sizes)
                plan.copies[name], plan.same[name] = [], []
                for region in regions(axes):
                    key = region.key | (unstacked & pattern.variables)
                    for number, (theirs, block) in enumerate(sources[key]):
                        names = sorted(stacked & theirs.variables)
                        for values, tensor in instance.names[theirs].items():
                            places = {**at, **dict(zip(names, values))}
                            copy = Copy(files.get(tensor, tensor), (block, region),
                                        instance.sizes, places)  # fmt: skip
                            (plan.same if number else plan.copies)[name].append(copy)
