"""The tensors of a checkpoint, each in one piece or several; only needed pieces are read.

A piece has its tensor's name and the place where it begins, `blocks.0.mlp.up.weight@64,0`. Those of
a tensor lie side by side on one axis: a mesh divides no other.
"""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from lockstep.files.stream import TensorEntry, TensorFile
from lockstep.files.untrusted import Refused

PIECE = re.compile(r"([^@]*)@([0-9]{1,12}(?:,[0-9]{1,12})*)?")


class SavedPiece(NamedTuple):
    starts: tuple[int, ...]
    file: TensorFile
    key: str  # its name in the file

    @property
    def entry(self) -> TensorEntry:
        return self.file.entries[self.key]


class Saved:
    """A tensor on the disk; `saved[index]` reads only the pieces that it needs."""

    def __init__(self, name: str, pieces: list[SavedPiece]) -> None:
        """Raises Refused where the pieces are not the tensor's parts, each number once."""
        self.pieces = sorted(pieces, key=lambda piece: piece.starts)
        self.axis, self.shape = _join(name, self.pieces)
        self.dtype = np.dtype(pieces[0].entry.dtype)

    def __getitem__(self, place: Any) -> np.ndarray:
        """Read a part.

        Args:
            place: `...`, or a slice for each of the first axes.
        """
        slices = () if place is ... else place if type(place) is tuple else (place,)
        slices = (*slices, *[slice(None)] * (len(self.shape) - len(slices)))
        wanted = [slice(*each.indices(n)[:2]) for each, n in zip(slices, self.shape)]
        if not self.shape:
            return self.pieces[0].file.read_slice(self.pieces[0].key, ())
        found, own = [], wanted[self.axis]
        for piece in self.pieces:
            start = piece.starts[self.axis]
            low, high = max(start, own.start), min(start + piece.entry.shape[self.axis], own.stop)
            if low < high:
                wanted[self.axis] = slice(low - start, high - start)
                found.append(piece.file.read_slice(piece.key, tuple(wanted)))
        if not found:
            return np.empty(self.shape, self.dtype)[tuple(slices)]
        return found[0] if len(found) == 1 else np.concatenate(found, self.axis)


def _join(name: str, pieces: list[SavedPiece]) -> tuple[int, tuple[int, ...]]:
    """Find the axis along which pieces are joined, and the shape of the tensor."""
    first, axes = pieces[0].entry, len(pieces[0].entry.shape)
    kinds = {(len(p.starts), len(p.entry.shape), p.entry.dtype) for p in pieces}
    if kinds != {(axes, axes, first.dtype)}:
        raise Refused(f"the pieces of {name} have not the same axes and dtype")
    axis, end = next((i for i in range(axes) if pieces[-1].starts[i]), 0), 0

    def on_axis(numbers: tuple[int, ...], number: int) -> tuple[int, ...]:
        return (*numbers[:axis], number, *numbers[axis + 1 :])

    for piece in pieces if axes else pieces[1:]:
        fits = axes and piece.starts == on_axis((0,) * axes, end)
        if not fits or on_axis(piece.entry.shape, 0) != on_axis(first.shape, 0):
            raise Refused(f"the pieces of {name} overlap or leave a gap")
        end += piece.entry.shape[axis]
    return axis, on_axis(first.shape, end) if axes else ()


def find(files: Iterable[TensorFile]) -> dict[str, Saved]:
    """Find the tensors of all pieces in some files; a name without an index is a whole tensor.

    Raises:
        Refused: the pieces of a tensor are not its parts, each number once.
    """
    found: dict[str, list[SavedPiece]] = {}
    for file in files:
        for key, entry in file.entries.items():
            match = PIECE.fullmatch(key)
            name, place = (match[1], match[2]) if match else (key, None)
            starts = tuple(map(int, place.split(","))) if place else (0,) * len(entry.shape)
            found.setdefault(name, []).append(SavedPiece(starts, file, key))
    return {name: Saved(name, pieces) for name, pieces in found.items()}


def piece_name(name: str, starts: Iterable[int]) -> str:
    return f"{name}@{','.join(map(str, starts))}"
