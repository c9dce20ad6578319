"""Functions that both frameworks' sides have in common."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lockstep_recorder import tree
from lockstep_recorder.user import User
from lockstep_recorder.written import Written

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
        self.differentiates = False  # inside its loss, by what its modules are given
        self.widened_state: list[str] = []  # of the optimizer: what it keeps in 32 bits
        self.change: tuple[str, ...] = ()  # what its calls do otherwise, for a counterfactual
        self.nudges = False  # constants made in float32 are moved as far as rounding may have
        self.shared: list[str] = []  # but not these buffers, which both programs have alike
        self.moves_sums = False  # sums are moved as far as another order of adding moves them
        self.mends_clip = False  # torch's clip has no epsilon, as optax's has none
        self.weights_format = ""  # the narrowest in which `build` makes weights
        self.written = Written()
        self.forward = False  # no gradient is asked for, and float64 nowhere
        self.scales = False  # the program has a scaler of gradients
        self.keeps = False  # the last run's state, of what is no float: a count, a switch
        self.drawn: list[tuple[Any, Arrays]] = []  # batches, by those who asked for them
        self.player: Any = None  # of the program's tape, once that was asked for
        self.chosen = False  # whether its precision is
        self.exact: ProgramSide | None = None  # see `in_float64`

    def about(self, **own: Any) -> dict[str, Any]:
        """Returns the facts of every side, and a framework's own."""
        return {
            "framework": self.framework, "precision": self.precision, "narrow": self.narrow,
            "widened": self.wide, "rounded": self.rounded, "narrowest": self.narrowest,
            "hooked": self.changed, "differentiates": self.differentiates,
            "weights_format": self.weights_format, "written": self.written.describe(),
            "forward": self.forward, **own,
        }  # fmt: skip

    @contextlib.contextmanager
    def in_float64(self) -> Iterator[ProgramSide]:
        """Gives a side of the program in float64, also where this one is in its own precision."""
        if not self.own:
            yield self
            return
        with self.wide_context():
            if self.exact is None:
                self.exact = self.again()
            yield self.exact

    def wide_context(self) -> Any:
        return contextlib.nullcontext()

    def again(self) -> ProgramSide:
        """Makes another side of the program, in float64."""
        raise NotImplementedError

    def batch(self, step: int) -> tuple[Any, Arrays]:
        return tree.take_apart(self.user.call("batch", step))

    def prepare(self, weights: Arrays, spec: Any, batch: Arrays) -> None:
        """Does beforehand what takes long, such as compiling; nothing is told."""

    def held(self, x: Any) -> np.ndarray:
        """A tensor in numpy: in float64, or where that is too large as it is."""
        if self.forward and "complex" not in str(x.dtype):
            return tree.as_held(x)
        return np.asarray(tree.to_numpy(x), np.float64)

    def counted(self) -> Arrays:
        """Returns by what the state of whole numbers, such as a count, has changed since it was
        made."""
        return {}

    def kept_values(self, also: Sequence[str] = ()) -> Arrays:
        """Returns the arrays of the variables that `update` has changed so far.

        Args:
            also: variables that another program's changes.
        """
        return {}

    def kept_by_update(self) -> list[str]:
        """Returns the program's variables that `update` changes, such as averaged weights."""
        return sorted(getattr(self, "kept", ()))

    def possible_changes(self, weights: Arrays, spec: Any, batch: Arrays) -> list[Any]:
        """Returns what could be done otherwise in the program's calls; see `torch_changes`."""
        return []

    def lacks_optimizer(self) -> str:
        return "" if self.user.has("optimizer") else f"no optimizer(model) in {self.user.name}"
