"""A mapping: its entries, how one is made, and what is left of both sides."""

from dataclasses import dataclass

from lockstep.check import names
from lockstep.check.layout import Entry, Piece, Shape, fitting_permutations
from lockstep.check.pairing.tensors import Tensors


@dataclass
class Mapping:
    entries: list[Entry]
    only_reference: list[str]
    only_port: list[str]
    notes: list[str]
    sides: tuple[Tensors, Tensors]

    @property
    def by_path(self) -> set[str]:
        """The port's tensors whose path is their partner's."""
        paths = [names.exact_paths([*side.shapes]) for side in self.sides]
        return {e.port.name for e in self.entries
                if paths[0][e.reference.name] == paths[1][e.port.name]}  # fmt: skip

    @property
    def left_on_one_side(self) -> list[str]:
        """The tensors of either side without a partner."""
        return [*self.only_reference, *self.only_port]

    @property
    def left_over(self) -> int:
        """How many tensors without a partner both sides have."""
        return min(len(self.only_reference), len(self.only_port))


def make_entry(reference: Tensors, r: Piece, port: Tensors, p: Piece) -> Entry:
    shape, port_shape = r.shape(reference.shapes), p.shape(port.shapes)
    choices = fitting_permutations(shape, port_shape)
    likely = likely_axes(reference, r.name, port, p.name, len(shape))
    choices.sort(key=lambda permutation: permutation != likely)
    return Entry(r, p, shape, port_shape, choices)


def likely_axes(reference: Tensors, r: str, port: Tensors, p: str, n: int = 0) -> Shape:
    """Orders a kernel's axes by the convention of its framework: out before in, or the reverse.

    Args:
        n: how many, where the piece has not all of the reference's tensor.
    """
    n = n or len(reference.shapes[r])
    same = tuple(range(n))
    kinds = reference.kinds.get(r, "") + port.kinds.get(p, "")
    if reference.framework == port.framework or n < 2 or "mbed" in kinds or "Conv1D" in kinds:
        return same
    if n == 2:
        return (1, 0)
    if reference.framework == "torch":  # OIHW -> HWIO
        return (*range(2, n), 1, 0)
    return (n - 1, n - 2, *range(n - 2))


def keep(mapping: Mapping, reference: set[str], port: set[str]) -> None:
    mapping.only_reference = [name for name in mapping.only_reference if name in reference]
    mapping.only_port = [name for name in mapping.only_port if name in port]


def drop_used(mapping: Mapping) -> None:
    used = {entry.reference.name for entry in mapping.entries}
    ours = {entry.port.name for entry in mapping.entries}
    keep(mapping, set(mapping.only_reference) - used, set(mapping.only_port) - ours)
