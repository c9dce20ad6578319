"""Functions that both frameworks' sides have in common."""

from __future__ import annotations

from typing import Any

import numpy as np

from lockstep_recorder import tree
from lockstep_recorder.user import User

Arrays = dict[str, np.ndarray]


class ProgramSide:
    """A user's program as the recording sees it; see `TorchSide` and `JaxSide`."""

    framework = ""
    wide = False  # casts to narrower floats mean float64
    precision = "float32"

    def __init__(self, user: User, own: bool) -> None:
        """
        Args:
            own: it runs in the precision in which it is written.
        """
        self.user, self.own = user, own
        self.narrowest = "float32"  # the narrowest format of its values, below float64
        self.narrow: list[str] = []
        self.rounded: list[str] = []
        self.changed: list[str] = []  # parameters whose gradients the recorder's hooks change
        self.player: Any = None  # of the program's tape, once that was asked for

    def about(self, **own: Any) -> dict[str, Any]:
        """Returns the facts of every side, and a framework's own."""
        return {
            "framework": self.framework, "precision": self.precision, "narrow": self.narrow,
            "widened": self.wide, "rounded": self.rounded, "narrowest": self.narrowest,
            "hooked": self.changed, **own,
        }  # fmt: skip

    def batch(self, step: int) -> tuple[Any, Arrays]:
        return tree.take_apart(self.user.call("batch", step))

    def kept_by_update(self) -> list[str]:
        """Returns the program's variables that `update` changes, such as averaged weights."""
        return sorted(getattr(self, "kept", ()))

    def lacks_optimizer(self) -> str:
        return "" if self.user.has("optimizer") else f"no optimizer(model) in {self.user.name}"
