"""Where a tensor of the port stands in the reference's: a slice of it, its axes permuted."""

from dataclasses import dataclass, field
from itertools import permutations
from math import prod
from typing import Any

import numpy as np

from lockstep.model.params import Arrays

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """A tensor, or a slice of it along one axis; `index` is one slice without the axis."""

    name: str
    axis: int | None = None
    start: int = 0
    stop: int = 0
    index: bool = False

    @property
    def slices(self) -> tuple[Any, ...]:
        if self.axis is None:
            return (slice(None),)
        at = self.start if self.index else slice(self.start, self.stop)
        return (*[slice(None)] * self.axis, at)

    def take(self, arrays: Arrays) -> np.ndarray:
        return arrays[self.name][self.slices]

    def shape(self, shapes: dict[str, Shape]) -> Shape:
        return np.empty(shapes[self.name], np.bool_)[self.slices].shape

    def __str__(self) -> str:
        if self.axis is None:
            return self.name
        at = f"{self.start}" if self.index else f"{self.start}:{self.stop}"
        return f"{self.name}[{':, ' * self.axis}{at}]"

    def to_json(self) -> dict[str, Any]:
        whole = {"name": self.name}
        if self.axis is None:
            return whole
        return {**whole, "axis": self.axis, "start": self.start, "stop": self.stop,
                "index": self.index}  # fmt: skip


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
    notes: list[str] = field(default_factory=list)

    @property
    def permutation(self) -> Shape:
        return self.choices[self.chosen]

    def to_port(self, x: np.ndarray) -> np.ndarray:
        return x.transpose(self.permutation).reshape(self.port_shape)

    def to_reference(self, x: np.ndarray) -> np.ndarray:
        permuted = [self.shape[axis] for axis in self.permutation]
        return x.reshape(permuted).transpose(np.argsort(self.permutation))

    @property
    def turned(self) -> bool:
        return self.permutation != tuple(range(len(self.shape)))

    def __str__(self) -> str:
        turn = f", axes {list(self.permutation)}" if self.turned else ""
        tied = f" (tied there to {self.alias})" if self.alias else ""
        return f"{self.port} <- {self.reference}{turn}{tied}"


def fitting_permutations(reference: Shape, port: Shape) -> list[Shape]:
    """The permutations of the reference's axes that give the port's shape, axes split or merged."""
    if prod(reference) != prod(port) or len(reference) > 5:
        return []
    found = []
    for permutation in permutations(range(len(reference))):
        permuted = tuple(reference[axis] for axis in permutation)
        if _regroups(permuted, port):
            found.append(permutation)
    return found


def _regroups(a: Shape, b: Shape) -> bool:
    """Whether one comes of the other by splitting or merging neighbouring axes, none of both."""
    if len(a) == len(b):
        return a == b
    longer, shorter = (a, b) if len(a) > len(b) else (b, a)
    longer = tuple(n for n in longer if n != 1)
    shorter = tuple(n for n in shorter if n != 1)
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
    """The port's arrays, from the reference's."""
    made: Arrays = {}
    for entry in entries:
        name = entry.port.name
        if name not in made:
            made[name] = np.zeros(shapes[name])
        made[name][entry.port.slices] = entry.to_port(entry.reference.take(reference))
    return made


def to_reference(entries: list[Entry], port: Arrays) -> list[np.ndarray]:
    """By entry, in the reference's layout."""
    return [entry.to_reference(entry.port.take(port)) for entry in entries]
