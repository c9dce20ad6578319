"""TensorAxes of a tensor as text, such as `q+k+v in`, and views of arrays by that text.

    in out             two axes, each of a size that has a name
    (heads size) in    the first axis is heads x size: the heads follow one another
    q+k+v in           the first axis has three parts, one after the other
    q:(heads size)+k:(groups size) in    parts with a label, where one size is no name for them
    [q] in heads size  this tensor is the part `q` of another's
    out in -height     the last axis runs backwards
    1 out              an axis of one place

Needs numpy alone: `lockstep convert --script` copies this file.
"""

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any

import numpy as np


class Unfit(ValueError):
    """A map, or a tensor that does not fit it."""


@dataclass(frozen=True)
class Size:
    """An axis, or a factor of one, whose size has a name."""

    name: str
    backwards: bool = False


@dataclass(frozen=True)
class Unit:
    """An axis of one place."""


@dataclass(frozen=True)
class Product:
    """An axis that is several, the slowest first."""

    factors: tuple["Node", ...]


@dataclass(frozen=True)
class Sum:
    """An axis of parts that follow one another."""

    labels: tuple[str, ...]
    parts: tuple["Node", ...]


@dataclass(frozen=True)
class Pick:
    """One part of a sum, in a region."""

    of: Sum
    at: int
    part: "Node"


Node = Size | Unit | Product | Sum | Pick
Sizes = Mapping[str, int]


@dataclass(frozen=True)
class TensorAxes:
    """The axes of a tensor, and the label of the part that it is."""

    dims: tuple[Node, ...]
    label: str = ""


@dataclass(frozen=True)
class Region:
    """A block of a tensor, without sums. Blocks of one key on both sides hold the same elements."""

    key: frozenset[str]
    dims: tuple[Node, ...]


NAME = r"[A-Za-z_][A-Za-z0-9_]*"
TOKEN = re.compile(rf"\s*({NAME}|\d+|[()+:\-\[\]])")


@cache
def parse_axes(text: str) -> TensorAxes:
    """Parses axes.

    Raises:
        Unfit: the text is malformed.
    """
    tokens: list[str] = []
    rest = text.strip()
    while rest:
        found = TOKEN.match(rest)
        if not found:
            raise Unfit(f"axes {text!r}: {rest[:20]!r} is no name, number or sign")
        tokens.append(found[1])
        rest = rest[found.end() :].strip()
    tokens.append("")
    label = ""
    if tokens[0] == "[":
        if len(tokens) < 4 or tokens[2] != "]" or not re.fullmatch(NAME, tokens[1]):
            raise Unfit(f"axes {text!r}: a label is one name in brackets")
        label, tokens = tokens[1], tokens[3:]
    dims = []
    try:
        while tokens[0]:
            dims.append(_parse_sum(tokens))
    except (IndexError, KeyError, RecursionError):
        raise Unfit(f"axes {text!r}: malformed; see docs/convert.md") from None
    axes = TensorAxes(tuple(dims), label)
    for region in regions(axes):
        names = [name for dim in region.dims for name in names_in(dim)]
        if len(names) != len({*names}):
            raise Unfit(f"axes {text!r}: has a size twice; give each its own name")
    return axes


def _parse_sum(tokens: list[str]) -> Node:
    labels, parts = [], []
    while True:
        label = ""
        if tokens[1] == ":":
            label = tokens.pop(0)
            tokens.pop(0)
        part = _parse_factor(tokens)
        labels.append(label or (part.name if isinstance(part, Size) else ""))
        parts.append(part)
        if tokens[0] != "+":
            break
        tokens.pop(0)
    if len(parts) == 1 and not label:
        return parts[0]
    if len({*labels} - {""}) < len(parts):
        raise KeyError
    return Sum(tuple(labels), tuple(parts))


def _parse_factor(tokens: list[str]) -> Node:
    token = tokens.pop(0)
    if token == "1":
        return Unit()
    if token == "(":
        factors = []
        while tokens[0] != ")":
            factors.append(_parse_sum(tokens))
        tokens.pop(0)
        if not factors:
            raise KeyError
        return Product(tuple(factors))
    backwards = token == "-"
    name = tokens.pop(0) if backwards else token
    if not re.fullmatch(NAME, name):
        raise KeyError
    return Size(name, backwards)


def axes_text(axes: TensorAxes) -> str:
    """Writes axes as `parse_axes` reads them."""
    label = f"[{axes.label}] " if axes.label else ""
    return label + " ".join(_text(dim) for dim in axes.dims)


def _text(node: Node) -> str:
    if isinstance(node, Size):
        return f"-{node.name}" if node.backwards else node.name
    if isinstance(node, Unit):
        return "1"
    if isinstance(node, Product):
        return f"({' '.join(map(_text, node.factors))})"
    assert isinstance(node, Sum)
    return "+".join(
        _text(part) if part == Size(label) else f"{label}:{_text(part)}"
        for label, part in zip(node.labels, node.parts)
    )


def names_in(node: Node) -> Iterator[str]:
    """Yields the names of sizes, of a sum those of all parts."""
    if isinstance(node, Size):
        yield node.name
    for each in _inside(node):
        yield from names_in(each)


def _inside(node: Node) -> tuple[Node, ...]:
    if isinstance(node, Pick):
        return (node.part,)
    if isinstance(node, Product):
        return node.factors
    return node.parts if isinstance(node, Sum) else ()


def names_of(axes: TensorAxes) -> set[str]:
    """Returns the names of all sizes."""
    return {name for dim in axes.dims for name in names_in(dim)}


def sums_in(node: Node) -> Iterator[Sum]:
    """Yields the sums of an axis."""
    if isinstance(node, Sum):
        yield node
    for each in _inside(node):
        yield from sums_in(each)


def has_unit(axes: TensorAxes) -> bool:
    """Says if an axis of one place stands alone, and not in turns with others."""
    return any(map(_has_unit, axes.dims))


def _has_unit(node: Node) -> bool:
    if isinstance(node, Sum) and {*node.parts} == {Unit()}:
        return False
    return isinstance(node, Unit) or any(map(_has_unit, _inside(node)))


def parts_of(axes: TensorAxes) -> dict[str, Node]:
    """Returns the parts of all sums by their labels."""
    sums = [each for dim in axes.dims for each in sums_in(dim)]
    return {label: part for each in sums for label, part in zip(each.labels, each.parts)}


def length(node: Node, sizes: Sizes) -> int:
    """Computes the length of an axis; KeyError where a size is unknown."""
    if isinstance(node, Size):
        return sizes[node.name]
    if isinstance(node, Unit):
        return 1
    if isinstance(node, Pick):
        return length(node.of, sizes)
    if isinstance(node, Product):
        return reduce(lambda n, each: n * length(each, sizes), node.factors, 1)
    return sum(length(part, sizes) for part in node.parts)


def shape_of(axes: TensorAxes, sizes: Sizes) -> tuple[int, ...]:
    """Computes the shape of a tensor; KeyError where a size is unknown."""
    return tuple(length(dim, sizes) for dim in axes.dims)


def solve(node: Node, total: int, sizes: dict[str, int], alias: Mapping[str, str]) -> str:
    """Adds the one size that is unknown to `sizes`, if there is one.

    Args:
        total: the axis's length.
        alias: name of a size -> the name that stands for it, of those that are equal.

    Returns:
        The name of the size, or "".

    Raises:
        Unfit: no size gives this length.
    """
    names = {alias.get(name, name) for name in names_in(node)}
    unknown = {name for name in names if name not in sizes}
    if len(unknown) > 1:
        return ""
    (name,) = unknown or {""}

    def length_with(n: int) -> int:
        known = {**sizes, name: n}
        return length(node, {each: known[alias.get(each, each)] for each in names_in(node)})

    none, one = length_with(0), length_with(1)
    size = (total - none) // (one - none) if one > none else 0
    if length_with(size) != total or (name and (size < 0 or one == none)):
        known = ", ".join(f"{each}={sizes[each]}" for each in sorted(names - unknown))
        raise Unfit(f"{_text(node)} cannot be {total}" + (f" with {known}" if known else ""))
    if name:
        sizes[name] = size
    return name


@cache
def regions(axes: TensorAxes) -> tuple[Region, ...]:
    """Lists the blocks of a tensor: one part of every sum."""
    label = {axes.label} if axes.label else set()
    combinations = itertools.product(*map(_choices, axes.dims))
    return tuple(
        Region(frozenset(label.union(*(key for key, _ in each))), tuple(dim for _, dim in each))
        for each in combinations
    )


def _choices(node: Node) -> list[tuple[set[str], Node]]:
    if isinstance(node, Sum):
        return [
            (key | {label}, Pick(node, at, part))
            for at, (label, whole) in enumerate(zip(node.labels, node.parts))
            for key, part in _choices(whole)
        ]
    if isinstance(node, Product):
        return [
            (set().union(*(key for key, _ in each)), Product(tuple(part for _, part in each)))
            for each in itertools.product(*map(_choices, node.factors))
        ]
    return [({*names_in(node)}, node)]


def view(x: np.ndarray, region: Region, sizes: Sizes) -> tuple[np.ndarray, list[str]]:
    """Makes a view of a region.

    Returns:
        An array with an axis for each size of the region, and the names of these.
    """
    dims, names, at = list(region.dims), [], 0
    while at < len(dims):
        node = dims[at]
        before: tuple[Any, ...] = (slice(None),) * at
        if isinstance(node, Size):
            x = x[(*before, slice(None, None, -1))] if node.backwards else x
            names.append(node.name)
            at += 1
        elif isinstance(node, Unit):
            x = x[(*before, 0)]
            del dims[at]
        elif isinstance(node, Product):
            parts = tuple(length(each, sizes) for each in node.factors)
            x = x.reshape(x.shape[:at] + parts + x.shape[at + 1 :])
            dims[at : at + 1] = node.factors
        else:
            assert isinstance(node, Pick)
            start = sum(length(each, sizes) for each in node.of.parts[: node.at])
            end = start + length(node.of.parts[node.at], sizes)
            x = x[(*before, slice(start, end))]
            dims[at] = node.part
    return x, names


def paired_views(
    source: Any, target: Any, regions: tuple[Region, Region], sizes: Sizes, places: Sizes
) -> tuple[np.ndarray, np.ndarray]:
    """Makes views of one region in two arrays, their axes in the target's order.

    Args:
        regions: the source's, the target's.
        places: index -> its number, where one tensor is stacked and the other has it in its name.
    """
    (x, have), (y, want) = (
        view(array, region, sizes) for array, region in zip((source, target), regions, strict=True)
    )
    x = x[tuple(slice(None) if name in want else places[name] for name in have)]
    y = y[tuple(slice(None) if name in have else places[name] for name in want)]
    have, common = [n for n in have if n in want], [n for n in want if n in have]
    return x.transpose([have.index(name) for name in common]), y
