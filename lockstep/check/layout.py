"""Where a tensor of the port stands in the reference's: a slice of it, its axes permuted."""

from dataclasses import dataclass
from itertools import permutations
from math import prod
from typing import Any

import numpy as np

from lockstep.model.params import Arrays

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Cut:
    """A slice along one axis; `index` is one of its places, without the axis."""

    axis: int
    start: int
    stop: int
    index: bool = False
    step: int = 1

    def of(self, x: np.ndarray) -> np.ndarray:
        at = self.start if self.index else slice(self.start, self.stop, self.step)
        return x[(*[slice(None)] * self.axis, at, ...)]

    def __str__(self) -> str:
        step = f":{self.step}" if self.step > 1 else ""
        at = self.start if self.index else f"{self.start}:{self.stop}{step}"
        return f"[{':, ' * self.axis}{at}]"

    def to_json(self) -> list[int | bool]:
        """Lists its fields, the step where there is one."""
        return [self.axis, self.start, self.stop, self.index, *[self.step] * (self.step > 1)]


@dataclass(frozen=True)
class Piece:
    """A tensor, or what cuts leave of it: a layer of a stack, a part of what is fused, or both."""

    name: str
    cuts: tuple[Cut, ...] = ()

    def take(self, arrays: Arrays) -> np.ndarray:
        """Returns a view of the piece."""
        x = arrays[self.name]
        for cut in self.cuts:
            x = cut.of(x)
        return x

    def cut(self, *cuts: Cut) -> "Piece":
        return Piece(self.name, (*self.cuts, *cuts))

    @property
    def layer(self) -> int | None:
        """The number of a layer in a stack; None outside of one."""
        return next((cut.start for cut in self.cuts if cut.index and not cut.axis), None)

    def shape(self, shapes: dict[str, Shape]) -> Shape:
        return self.take({self.name: np.broadcast_to(np.False_, shapes[self.name])}).shape

    def __str__(self) -> str:
        return self.name + "".join(map(str, self.cuts))

    def to_json(self) -> dict[str, Any]:
        cuts = [cut.to_json() for cut in self.cuts]
        return {"name": self.name, "cuts": cuts} if cuts else {"name": self.name}


@dataclass
class Entry:
    """One piece of the port beside one of the reference."""

    reference: Piece
    port: Piece
    shape: Shape  # of the reference's piece
    port_shape: Shape
    choices: list[Shape]  # the permutations that fit, the likeliest first
    chosen: int = 0
    alias: str = ""  # the reference's tied name, where the port has a tensor of its own for it
    given: bool = False  # by hand

    @property
    def permutation(self) -> Shape:
        return self.choices[self.chosen]

    def to_port(self, x: np.ndarray) -> np.ndarray:
        return x.transpose(self.permutation).reshape(self.port_shape)

    def to_reference(self, x: np.ndarray) -> np.ndarray:
        return _unpermute(x, self.shape, self.permutation)

    @property
    def turned(self) -> bool:
        return self.permutation != tuple(range(len(self.shape)))

    def __str__(self) -> str:
        turn = f", axes {list(self.permutation)}" if self.turned else ""
        tied = f" (tied there to {self.alias})" if self.alias else ""
        return f"{self.port} <- {self.reference}{turn}{tied}"


def fitting_permutations(reference: Shape, port: Shape) -> list[Shape]:
    """Lists permutations of the reference's axes that give the port's shape, split or merged."""
    if prod(reference) != prod(port) or len(reference) > 5:
        return []
    found = []
    for permutation in permutations(range(len(reference))):
        permuted = tuple(reference[axis] for axis in permutation)
        if _regroups(permuted, port):
            found.append(permutation)
    return found


def _regroups(a: Shape, b: Shape) -> bool:
    """Says if one comes of the other by splitting or merging neighbouring axes, none of both."""
    held = [tuple(n for n in shape if n != 1) for shape in (a, b)]
    shorter, longer = sorted(held, key=len)
    if len(a) == len(b) and len(shorter) == len(longer):
        return a == b
    at = 0
    for n in shorter:
        size = 1
        while size < n and at < len(longer):
            size *= longer[at]
            at += 1
        if size != n:
            return False
    return at == len(longer)


def to_port(entries: list[Entry], reference: Arrays, shapes: dict[str, Shape]) -> Arrays:
    """Makes the port's arrays of the reference's: views of these where one is a whole tensor."""
    made: Arrays = {}
    for entry in entries:
        name, values = entry.port.name, entry.to_port(entry.reference.take(reference))
        if not entry.port.cuts:
            made[name] = values
            continue
        if name not in made:
            made[name] = np.zeros(shapes[name], values.dtype)
        entry.port.take(made)[...] = values
    return made


@dataclass(frozen=True)
class Axes:
    """How an activation of the port stands in the reference's shape: axes in another order."""

    ours: Shape
    theirs: Shape
    order: Shape  # of the axes of the side that has more, which gives the other's shape
    finer_is_theirs: bool
    columns: tuple[int, ...] = ()  # the reference's index at each of the port's, in the last axis

    def to_theirs(self, x: np.ndarray) -> np.ndarray:
        if self.columns:
            return x[..., np.argsort(self.columns)]
        if self.finer_is_theirs:
            return _unpermute(x, self.theirs, self.order)
        return x.transpose(self.order).reshape(self.theirs)

    def to_ours(self, x: np.ndarray) -> np.ndarray:
        if self.columns:
            return x[..., list(self.columns)]
        if self.finer_is_theirs:
            return x.transpose(self.order).reshape(self.ours)
        return _unpermute(x, self.ours, self.order)

    @property
    def moved(self) -> bool:
        return bool(self.columns) or self.order != tuple(range(len(self.order)))


def _unpermute(x: np.ndarray, shape: Shape, order: Shape) -> np.ndarray:
    return x.reshape([shape[axis] for axis in order]).transpose(np.argsort(order))


def axes_between(ours: Shape, theirs: Shape) -> list[Axes]:
    """All of them, those that leave the order as it is and channels first or last before others."""
    finer_is_theirs = len(theirs) >= len(ours)
    finer, coarser = (theirs, ours) if finer_is_theirs else (ours, theirs)
    n = len(finer)
    found = fitting_permutations(finer, coarser) or [tuple(range(n))]
    usual = usual_orders(n)
    found.sort(key=lambda order: usual.index(order) if order in usual else n)
    return [Axes(ours, theirs, order, finer_is_theirs) for order in found]


def usual_orders(n: int) -> list[Shape]:
    """Lists the orders of axes of one activation in both frameworks: as it is, channels last, and
    channels first."""
    return [tuple(range(n)), (0, *range(2, n), 1), (0, n - 1, *range(1, n - 1))]
