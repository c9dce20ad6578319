"""One side's tensors, as a mapping sees them."""

from dataclasses import dataclass, field

from lockstep.check import names
from lockstep.check.layout import Shape


@dataclass(frozen=True)
class Tensors:
    """One side's tensors, as a mapping sees them."""

    shapes: dict[str, Shape]
    kinds: dict[str, str]  # tensor -> the class of its module
    order: list[str]  # in the order in which their modules are called
    framework: str
    parameters: set[str]  # the others are state or constants
    aliases: dict[str, str] = field(default_factory=dict)  # tied name -> the tensor's

    @property
    def indexes(self) -> dict[str, tuple[int, ...]]:
        return names.layer_indexes([*self.shapes, *self.aliases])
