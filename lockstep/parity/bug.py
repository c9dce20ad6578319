"""A planted bug: what it is, and where it shows. `mutants/` declares them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Bug:
    """A planted bug of one twin. Calling it plants it for the life of the process.

    Args:
        what: one sentence without a full stop.
        rung: the one that must catch it.
        flags: the config in which it shows, over `matrix.SMALL`.
        size: the default size of a graded bug, which takes another one when it is called.
        make: returns what plants it; called in a process that has the twin's framework.
    """

    name: str
    framework: str
    what: str
    rung: int
    flags: dict[str, Any] = field(default_factory=dict)
    size: float | None = None
    make: Callable[..., Callable[[], None]] = field(repr=False, compare=False)

    def __call__(self, *size: float) -> None:
        self.make(*size)()
