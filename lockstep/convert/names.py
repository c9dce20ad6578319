"""Which numbers in tensors' names are indices, and how those of both sides belong together."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

Pair = tuple[str, str]  # a tensor's name in the reference, and in the port
DIGITS = re.compile(r"\d+")
ALIKE = {"h": "layer", "layers": "layer", "blocks": "layer", "block": "layer", "layer": "layer"}
SIDES = (0, 1)  # the reference, the port


@dataclass(frozen=True)
class Place:
    """A number in the names of one side, known by the text before it."""

    side: int
    prefix: str  # earlier numbers are #

    @property
    def word(self) -> str:
        words = re.findall(r"[A-Za-z]+", self.prefix)
        word = words[-1].lower() if words else "index"
        singular = word[:-1] if word.endswith("s") and len(word) > 3 else word
        return ALIKE.get(word, singular)


@dataclass
class Indices:
    """The indices of all names.

    Attributes:
        texts: a place -> how it is written, such as `2*layer+1`.
        counted: a place -> the places of the other side whose tuples it counts.
    """

    texts: dict[Place, str] = field(default_factory=dict)
    variables: dict[Place, str] = field(default_factory=dict)
    counted: dict[Place, tuple[Place, ...]] = field(default_factory=dict)


@cache
def places_in(side: int, name: str) -> tuple[tuple[Place, int], ...]:
    """Lists the numbers in a name."""
    return tuple(
        (Place(side, DIGITS.sub("#", name[: found.start()])), int(found[0]))
        for found in DIGITS.finditer(name)
        if found[0] == str(int(found[0]))
    )


def find_indices(pairs: Sequence[Pair]) -> Indices:
    """Finds the places whose numbers depend on one another."""
    indices = Indices()
    rows = [{**dict(places_in(0, r)), **dict(places_in(1, p))} for r, p in pairs]
    modules = _module_places(pairs)
    every = {place for row in rows for place in row}
    ordered = sorted(every, key=lambda place: (place.side, place.prefix.count("#"), place.prefix))
    for side in (1, 0):  # the reference's numbers name the variables, if they can
        for place in (p for p in ordered if p.side == side and p not in indices.texts):
            having = [row for row in rows if place in row]
            if len({row[place] for row in having}) > 1:
                others = [p for p in ordered if p.side != side and all(p in row for row in having)]
                others = [p for p in others if {p, place} & modules]
                _relate(indices, place, others, having, modules)
    return indices


def _module_places(pairs: Sequence[Pair]) -> set[Place]:
    """Returns numbers that are a path's whole part, or stand in the name of a module of modules."""
    found = set()
    for side in SIDES:
        for name in {pair[side] for pair in pairs}:
            for place, _ in places_in(side, name):
                after = DIGITS.sub("", name[len(place.prefix) :], count=1)
                whole = place.prefix.endswith((".", "#.")) or not place.prefix
                if (whole and after.startswith(".")) or after.count(".") > 1:
                    found.add(place)
    return found


def _relate(
    indices: Indices, place: Place, others: list[Place], rows: list[dict[Place, int]],
    modules: set[Place],
) -> None:  # fmt: skip
    for other in others:
        taken = indices.variables.get(other)
        for variable, function in ((other, place), (place, other)):
            if (line := _line({row[variable]: row[function] for row in rows}, rows, variable,
                              function)) and not (taken and variable == place):  # fmt: skip
                name = taken or _new_name(indices, variable)
                indices.texts[variable] = indices.variables[variable] = name
                indices.texts[function] = _affine(name, *line)
                indices.variables[function] = name
                return
    for count in (2, 3):
        if len(others) >= count and place in modules:
            several = tuple(others[:count])
            tuples = [tuple(row[other] for other in several) for row in rows]
            number = {each: at for at, each in enumerate(sorted({*tuples}))}
            if all(number[each] == row[place] for each, row in zip(tuples, rows)):
                indices.counted[place] = several
                for other in several:
                    name = indices.variables.get(other) or _new_name(indices, other)
                    indices.texts[other] = indices.variables[other] = name
                return


def _line(
    found: Mapping[int, int], rows: Iterable[Mapping[Place, int]], variable: Place, function: Place
) -> tuple[int, int] | None:
    """Returns factor and offset where the one number is a line of the other."""
    if len(found) < 2:
        return None
    a, b, *_ = sorted(found)
    factor, rest = divmod(found[b] - found[a], b - a)
    offset = found[a] - factor * a
    if rest or factor < 1 or offset < 0:
        return None
    fits = all(row[function] == factor * row[variable] + offset for row in rows)
    return (factor, offset) if fits else None


def _affine(name: str, factor: int, offset: int) -> str:
    return (f"{factor}*" if factor > 1 else "") + name + (f"+{offset}" if offset else "")


def _new_name(indices: Indices, place: Place) -> str:
    taken = {*indices.variables.values()}
    name, number = place.word, 2
    while name in taken:
        name, number = f"{place.word}{number}", number + 1
    return name


def name_patterns(pairs: Sequence[Pair]) -> list[tuple[Pair, dict[str, int]]]:
    """Writes each pair of names with indices, and tells the indices' values."""
    indices = find_indices(pairs)
    groups: dict[Pair, list[int]] = {}
    for at, pair in enumerate(pairs):
        skeleton = DIGITS.sub("#", pair[0]), DIGITS.sub("#", pair[1])
        groups.setdefault(skeleton, []).append(at)
    found: list[tuple[Pair, dict[str, int]]] = [(("", ""), {})] * len(pairs)
    for group in groups.values():
        for at, each in zip(group, _patterns_of_group([pairs[at] for at in group], indices)):
            found[at] = each
    return found


def _patterns_of_group(
    pairs: Sequence[Pair], indices: Indices
) -> list[tuple[Pair, dict[str, int]]]:
    """Writes the patterns of names that are the same but for their numbers."""
    rows = [{**dict(places_in(0, r)), **dict(places_in(1, p))} for r, p in pairs]
    varying = {place for place in rows[0] if len({row[place] for row in rows}) > 1}
    texts: dict[Place, str] = {}
    for place in rows[0]:
        if several := indices.counted.get(place):
            if place in varying:
                texts[place] = ",".join(indices.texts[o] if o in varying else str(rows[0][o])
                                        for o in several)  # fmt: skip
        elif place in varying and place in indices.texts:
            texts[place] = indices.texts[place]
        elif place in varying and _stacks(pairs, rows, place):
            name = indices.variables.get(place) or _new_name(indices, place)
            indices.texts[place] = indices.variables[place] = texts[place] = name
    found = []
    for pair, row in zip(pairs, rows):
        values = {
            indices.variables[place]: _solve(text, row[place])
            for place, text in texts.items()
            if "," not in text
        }
        found.append(((_write(0, pair[0], texts), _write(1, pair[1], texts)), values))
    return found


def _stacks(pairs: Sequence[Pair], rows: Sequence[Mapping[Place, int]], place: Place) -> bool:
    """Says if tensors with other numbers here are one tensor on the other side."""
    held: dict[str, set[int]] = {}
    for pair, row in zip(pairs, rows):
        held.setdefault(pair[1 - place.side], set()).add(row[place])
    return any(len(numbers) > 1 for numbers in held.values())


def _solve(text: str, number: int) -> int:
    factor, _, rest = text.rpartition("*")
    offset = rest.partition("+")[2]
    return (number - int(offset or 0)) // int(factor or 1)


def _write(side: int, name: str, texts: Mapping[Place, str]) -> str:
    def replace(found: re.Match[str]) -> str:
        place = Place(side, DIGITS.sub("#", name[: found.start()]))
        return f"{{{texts[place]}}}" if place in texts else found[0]

    return DIGITS.sub(replace, name)
