"""Recurrent cells: torch and NNX have a cell's gates in one tensor, Linen a tensor for each gate.

A gate's value is the sum of what both of its kernels give, so values tell none of them apart.
"""

import re
from collections.abc import Iterator

from lockstep.check import names
from lockstep.check.layout import Cut, Piece
from lockstep.check.pairing.entries import Mapping, drop_used, make_entry
from lockstep.check.pairing.tensors import Tensors

ORDERS = ("ifgo", "rzn")  # of the gates of a fused LSTM and GRU
GATE = re.compile(r"([ih])([ifgorzn])_?$")
Cell = dict[tuple[str, bool], dict[str, str]]  # (input or hidden, bias) -> gate -> tensor
Whole = dict[tuple[str, bool], str]  # (input or hidden, bias) -> tensor


def match_gates(mapping: Mapping, reference: Tensors, port: Tensors) -> None:
    """Pairs the parts of fused tensors with a tensor for each gate; either way round."""
    for port_fuses in (True, False):
        fusing, splitting = (port, reference) if port_fuses else (reference, port)
        only = (mapping.only_port, mapping.only_reference)
        fused, split = only if port_fuses else reversed(only)
        wholes = list(_fused_cells(fused, fusing))
        cells = [cell for cell in _cells(split) if cell["h", False]]
        for whole, cell, order in _likeliest(wholes, cells, fusing, splitting):
            for key, name in whole.items():
                axis = _axis(name, fusing)
                length = fusing.shapes[name][axis] // len(order)
                for at, gate in enumerate(order if set(cell.get(key, ())) == set(order) else ""):
                    part = Piece(name).cut(Cut(axis, at * length, (at + 1) * length))
                    pieces = Piece(cell[key][gate]), part
                    r, p = pieces if port_fuses else reversed(pieces)
                    mapping.entries.append(make_entry(reference, r, port, p))
        drop_used(mapping)


def _likeliest(
    wholes: list[Whole], cells: list[Cell], fusing: Tensors, splitting: Tensors
) -> Iterator[tuple[Whole, Cell, str]]:
    """Yields partners of one size: of one direction, then of names alike, then in the order of
    layers and of calls."""
    order = {name: at for at, name in enumerate(splitting.order)}
    cells = sorted(cells, key=lambda cell: (splitting.indexes[_one(cell)], order[_one(cell)]))
    scored = []
    for a, whole in enumerate(wholes):
        for b, cell in enumerate(cells):
            gates = next((o for o in ORDERS if set(o) == set(cell["h", False])), "")
            if gates and _fits(whole, cell, gates, fusing, splitting):
                one, other = fusing.spelt[whole["h", False]], splitting.spelt[_one(cell)]
                across = ("reverse" in names.words(one)) != ("reverse" in names.words(other))
                alike = names.share_of_words(one, names.outer(other))
                scored.append((across, -alike, a, b, gates))
    done: set[tuple[str, int]] = set()
    for _, _, a, b, gates in sorted(scored):
        if not done & {("whole", a), ("cell", b)}:
            done |= {("whole", a), ("cell", b)}
            yield wholes[a], cells[b], gates


def _one(cell: Cell) -> str:
    """Names one of a cell's tensors."""
    return next(iter(cell["h", False].values()))


def _fits(whole: Whole, cell: Cell, order: str, fusing: Tensors, splitting: Tensors) -> bool:
    """Says if the kernels of both have the same sizes."""
    for key in (("i", False), ("h", False)):
        parts = [splitting.shapes[name] for name in cell.get(key, {}).values()]
        if key not in whole or len(parts) != len(order) or len(set(parts)) != 1:
            return False
        shape = [*fusing.shapes[whole[key]]]
        shape[_axis(whole[key], fusing)] //= len(order)
        if sorted(parts[0]) != sorted(shape):
            return False
    return True


def _axis(name: str, side: Tensors) -> int:
    """Returns the axis of what a layer gives, along which the gates stand."""
    return 0 if side.framework == "torch" else len(side.shapes[name]) - 1


def _fused_cells(tensors: list[str], side: Tensors) -> Iterator[Whole]:
    """Yields the tensors of each cell that has its gates in one."""
    cells: dict[str, Whole] = {}
    for name in tensors:
        *outer, kernel, leaf = ["", "", *names.segments(side.spelt[name])]
        if kernel in ("ih", "hh"):
            cells.setdefault(".".join(outer), {})[kernel[0], bool(names.is_bias(leaf))] = name
    yield from cells.values()


def _cells(tensors: list[str]) -> Iterator[Cell]:
    cells: dict[str, Cell] = {}
    for name in tensors:
        module = names.owner(name)
        if found := GATE.match(names.segments(module)[-1] if module else ""):
            cell = cells.setdefault(names.outer(name), {("h", False): {}})
            cell.setdefault((found[1], bool(names.is_bias(name))), {})[found[2]] = name
    yield from cells.values()
