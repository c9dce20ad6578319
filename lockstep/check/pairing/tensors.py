"""One side's tensors, as a mapping sees them."""

from dataclasses import dataclass, field
from functools import cached_property

from lockstep.check import names
from lockstep.check.layout import Shape
from lockstep.check.pairing import siblings


@dataclass(frozen=True)
class Tensors:
    """One side's tensors, as a mapping sees them."""

    shapes: dict[str, Shape]
    kinds: dict[str, str]  # tensor -> the class of its module
    order: list[str]  # in the order in which their modules are called
    framework: str
    parameters: set[str]  # the others are state or constants
    aliases: dict[str, str] = field(default_factory=dict)  # tied name -> the tensor's

    @cached_property
    def spelt(self) -> dict[str, str]:
        """Names that say what their siblings show."""
        return siblings.spell_out(self.shapes)

    @cached_property
    def indexes(self) -> names.Indexes:
        """Maps names to their layers."""
        spelt = {name: self.spelt.get(name, name) for name in (*self.shapes, *self.aliases)}
        found = names.layer_indexes(list(spelt.values()))
        return {name: found[own] for name, own in spelt.items()}

    @cached_property
    def numbers(self) -> dict[str, tuple[int, int]]:
        """See `names.own_numbers`."""
        found = names.own_numbers(self.spelt.values())
        return {name: found[own] for name, own in self.spelt.items() if own in found}

    @cached_property
    def layers(self) -> int:
        """How many layers are numbered; a module's only number is none."""
        return len({index[0] for index in self.indexes.values() if index})

    def owner(self, name: str) -> str:
        """Names the module that holds a tensor."""
        return names.owner(self.spelt[name])
