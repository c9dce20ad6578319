"""Dependencies between the values of a tape, on the recorder's side and on the check's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

PARAMETER, BATCH = 1, 2  # of what a value is made


class Graph:
    """Values by number, each made of earlier ones; `loss` is the number of the last."""

    loss = -1

    def origins(self) -> list[str]:
        """Lists for each value "parameter" or "batch" where it is one."""
        raise NotImplementedError

    def inputs(self, number: int) -> Sequence[int]:
        """Lists the values of which one is made."""
        raise NotImplementedError

    @cached_property
    def depends(self) -> list[int]:
        """Maps each value to what it is made of: PARAMETER, BATCH, or both."""
        found: list[int] = []
        for number, origin in enumerate(self.origins()):
            own = {"parameter": PARAMETER, "batch": BATCH}.get(origin, 0)
            for n in self.inputs(number):
                own |= found[n]
            found.append(own)
        return found

    def is_pure(self, number: int) -> bool:
        """Says if a value depends on parameters alone."""
        return self.depends[number] == PARAMETER

    def is_data(self, number: int) -> bool:
        """Says if a value depends on the batch."""
        return bool(self.depends[number] & BATCH)

    def above(self, numbers: Iterable[int]) -> set[int]:
        """Returns these values and all that they are made of."""
        stack = list(numbers)
        seen = set(stack)
        while stack:
            for n in self.inputs(stack.pop()):
                if n not in seen:
                    seen.add(n)
                    stack.append(n)
        return seen

    @cached_property
    def needed(self) -> set[int]:
        """The values that reach the loss."""
        return self.above([self.loss])

    @cached_property
    def data(self) -> list[int]:
        """The values that depend on the batch and reach the loss, in order."""
        return [n for n in sorted(self.needed) if self.is_data(n)]

    @cached_property
    def constants(self) -> list[int]:
        """The values that depend on neither the batch nor parameters, and reach the loss, in
        order."""
        return [n for n in sorted(self.needed) if not self.depends[n]]

    @cached_property
    def meetings(self) -> list[int]:
        """The operations at which data meets parameters, in order."""
        return [n for n in self.data if any(map(self.is_pure, self.inputs(n)))]
