"""Recurrent cells: torch has a cell's gates in one tensor, Flax a tensor for each gate.

A gate's value is the sum of what both of its kernels give, so values tell none of them apart.
"""

import re
from collections.abc import Iterator

from lockstep.check import names
from lockstep.check.entries import Mapping, drop_used, make_entry
from lockstep.check.layout import Cut, Piece
from lockstep.check.tensors import Tensors

ORDERS = ("ifgo", "rzn")  # of the gates of torch's LSTM and GRU
GATE = re.compile(r"([ih])([ifgorzn])_?$")
Cell = dict[tuple[str, bool], dict[str, str]]  # (input or hidden, bias) -> gate -> tensor


def match_gates(mapping: Mapping, reference: Tensors, port: Tensors) -> None:
    """Pairs the parts of fused tensors with a tensor for each gate; either way round."""
    for port_fuses in (True, False):
        fusing, splitting = (port, reference) if port_fuses else (reference, port)
        only = (mapping.only_port, mapping.only_reference)
        fused, split = only if port_fuses else reversed(only)
        cells = list(_cells(split))
        for wholes in _fused_cells(fused):
            for cell in cells:
                order = next((o for o in ORDERS if set(o) == set(cell["h", False])), "")
                if not order or not _fits(wholes, cell, order, fusing, splitting):
                    continue
                for key, whole in wholes.items():
                    length = fusing.shapes[whole][0] // len(order)
                    for at, gate in enumerate(
                        order if set(cell.get(key, ())) == set(order) else ""
                    ):
                        part = Piece(whole).cut(Cut(0, at * length, (at + 1) * length))
                        pieces = Piece(cell[key][gate]), part
                        r, p = pieces if port_fuses else reversed(pieces)
                        mapping.entries.append(make_entry(reference, r, port, p))
                cells.remove(cell)
                break
        drop_used(mapping)


def _fits(
    wholes: dict[tuple[str, bool], str], cell: Cell, order: str, fusing: Tensors, splitting: Tensors
) -> bool:
    """Says if the kernels of both have the same sizes."""
    for key in (("i", False), ("h", False)):
        parts = [splitting.shapes[name] for name in cell.get(key, {}).values()]
        if key not in wholes or len(parts) != len(order) or len(set(parts)) != 1:
            return False
        rows, width = fusing.shapes[wholes[key]]
        if sorted(parts[0]) != sorted((rows // len(order), width)):
            return False
    return True


def _fused_cells(tensors: list[str]) -> Iterator[dict[tuple[str, bool], str]]:
    """Yields each cell's tensors: (input or hidden, bias) -> name."""
    cells: dict[tuple[str, str | None], dict[tuple[str, bool], str]] = {}
    for name in tensors:
        module, _, leaf = name.rpartition(".")
        if found := names.CELL.match(leaf):
            cells.setdefault((module, found[4]), {})[found[3], found[1] == "bias"] = name
    yield from cells.values()


def _cells(tensors: list[str]) -> Iterator[Cell]:
    cells: dict[str, Cell] = {}
    for name in tensors:
        module = names.owner(name)
        if found := GATE.match(names.segments(module)[-1] if module else ""):
            cell = cells.setdefault(names.outer(name), {("h", False): {}})
            cell.setdefault((found[1], bool(names.is_bias(name))), {})[found[2]] = name
    yield from cells.values()
