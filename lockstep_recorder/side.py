"""Functions that both frameworks' sides have in common."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from lockstep_recorder import tree
from lockstep_recorder.memory import is_large
from lockstep_recorder.noise import relative_gaps
from lockstep_recorder.user import Mistake, User
from lockstep_recorder.written import Written

Arrays = dict[str, np.ndarray]
DRAWN = 1e-3  # of the largest element: sines of large angles in float32 are as far from exact
LEAST_GAP = 1e-13  # relative: less is rounding in float64
LEAST_SIZE = 1e-3  # of a gradient beside that of all tensors: what is smaller is measured as this


class Look(NamedTuple):
    """Holds what one run of a program in float64 shows.

    Attributes:
        narrow: operations that make narrower floats of float64.
        rounded: narrower floats that float64 is made of.
        raised: the error with which the program refuses float64.
    """

    narrow: list[str]
    rounded: list[str]
    raised: Mistake | None = None

    @property
    def is_exact(self) -> bool:
        return not (self.narrow or self.raised)


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
        self.constants = 0.0  # how far those made in float32 move the program; see `choose`
        self.exact_constants: Arrays = {}  # those of the model that were made once more
        self.refused = ""  # what the program raises in float64
        self.unseen: list[str] = []
        self.seed = 0  # given to build
        self.changed: list[str] = []  # parameters whose gradients the recorder's hooks change
        self.differentiates = False  # inside its loss, by what its modules are given
        self.widened_state: list[str] = []  # of the optimizer: what it keeps in 32 bits
        self.moves_sums = False  # sums are moved as far as another order of adding moves them
        self.mends_clip = False  # torch's clip has no epsilon, as optax's has none
        self.weights_format = ""  # the narrowest in which `build` makes weights
        self.written = Written()
        self.forward = False  # no gradient is asked for, and float64 nowhere
        self.sets: set[str] = set()  # variables beside the model that tracing the program sets
        self.asked: dict[str, list[bool]] = {}  # by step of the optimizer alone: a tensor trains
        self.spoiled: Arrays = {}  # what the last loss made of its batch, where that is changed
        self.kept: set[str] = set()  # variables that `update` changes, see `held`
        self.wraps: set[str] = set()  # formats of a batch's whole numbers that overflow
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
            "forward": self.forward, "constants": self.constants, "refused": self.refused,
            "unseen": self.unseen, **own,
        }  # fmt: skip

    def choose(self, weights: Arrays, spec: Any, batch: Arrays) -> None:
        """Chooses float64 where nothing in the program is narrower, or nothing where all floats
        that the program makes are float64; else its own precision.

        Where constants alone are narrower, both runs are compared: how far these constants move the
        loss or a gradient is kept as `constants`.
        """
        self.wide, self.precision, self.constants = False, "float64", 0.0
        plain = self.look(weights, spec, batch)
        if plain == Look([], []):
            self.narrow, self.rounded = [], []
            return
        known = self._figures(weights, spec, batch) if plain.is_exact else None
        self.wide = True
        wide = self.look(weights, spec, batch)
        if wide.is_exact and wide.rounded and not is_large(weights):
            wide = self._with_exact_constants(weights, spec, batch, wide)
        self.wide = wide.is_exact
        if self.wide:
            self.narrow, self.rounded = [], wide.rounded
            after = self._figures(weights | self.exact_constants, spec, batch) if known else None
            self.constants = _largest_gap(known, after) if known and after else 0.0
            return
        self.narrow, self.rounded = wide.narrow or plain.narrow, plain.rounded
        if plain.raised:
            self.refuse(plain.raised)
        elif plain.narrow:
            self.precision = self.narrowest = "float32"

    def look(self, weights: Arrays, spec: Any, batch: Arrays) -> Look:
        """Traces or runs the loss once, as `wide` says."""
        raise NotImplementedError

    def figures(self, weights: Arrays, spec: Any, batch: Arrays) -> tuple[float, Arrays]:
        """Returns the loss and the gradients."""
        raise NotImplementedError

    def refuse(self, raised: Mistake) -> None:
        """Turns to the program's own precision, for in float64 it raises."""
        raise NotImplementedError

    def told_refusal(self) -> list[str]:
        return [f"in float64 it raises: {self.refused}"] * bool(self.refused)

    def make_wide(self) -> Any:
        """Returns a context in which each float that a program makes is float64."""
        raise NotImplementedError

    def initial(self) -> Arrays:
        """Returns the tensors that `build` made, by name."""
        raise NotImplementedError

    def build(self, seed: int) -> Arrays:
        """Returns the tensors that `build` makes of a seed, by name; the side keeps its own."""
        raise NotImplementedError

    def take(self, user: User, built: Any) -> None:
        """Takes what a program's `build` made."""
        raise NotImplementedError

    def put(self, values: Arrays) -> None:
        """Puts values in place of those that `build` made."""
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        raise NotImplementedError

    def _figures(self, weights: Arrays, spec: Any, batch: Arrays) -> tuple[float, Arrays] | None:
        try:
            return self.figures(weights, spec, batch)
        except Mistake:  # which a run will tell
            return None

    def _with_exact_constants(
        self, weights: Arrays, spec: Any, batch: Arrays, found: Look
    ) -> Look:  # fmt: skip
        """Loads and builds the program once more, where each float that it makes is float64, for
        the constants that are made then. Parameters stay, and buffers that are drawn.

        Args:
            found: by a look at the program as it is.

        Returns:
            What a look finds then; the same where it is no better.
        """
        former, before, trained = dict(vars(self)), self.initial(), set(self.facts()["parameters"])
        with contextlib.suppress(Mistake):  # it may not be loaded twice
            with self.make_wide():
                user = self.user.anew()
                self.take(user, user.call("build", self.seed))
            made = self.initial()
            alike = {n: x.shape for n, x in made.items()} == {n: x.shape for n, x in before.items()}
            exact = {n: x for n, x in made.items() if alike and n not in trained
                     and (x != before[n]).any() and _is_rounding(before[n], x)}  # fmt: skip
            if alike:
                self.put(before | exact)
                after = self.look(weights | exact, spec, batch)
                if after.is_exact and len(after.rounded) < len(found.rounded):
                    self.exact_constants |= exact
                    return after
        vars(self).update(former)
        return found

    @contextlib.contextmanager
    def in_float64(self) -> Iterator[ProgramSide]:
        """Gives a side of the program in float64, also where this one is in its own precision."""
        if not self.own or self.refused:
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

    def evaluated(
        self, weights: Arrays, spec: Any, batch: Arrays
    ) -> tuple[dict[str, Any], Arrays]:  # fmt: skip
        """Runs the program with its model in evaluation, where that has such a mode; nothing where
        it has none, or raises then."""
        return {}, {}

    def restore(self) -> None:
        """Gives variables beside the model, such as a count of updates, their first values."""

    def marks(self) -> dict[str, int]:
        """Returns a digest of each variable beside the model."""
        return {}

    def limits(self) -> dict[str, Any]:
        """Returns what its runs have not shown: `conditions` that always came out alike; `sets`,
        see there; `wraps`, where whole numbers are others than in an ordinary run."""
        conditions = self.user.conditions
        return {"conditions": conditions.one_sided(), "sets": sorted(self.sets),
                "wraps": sorted(self.wraps | conditions.wraps)}  # fmt: skip

    def note_kept(self, before: dict[str, int]) -> None:
        """Notes the variables that updates have changed since their `marks` were taken."""
        self.kept |= {name for name, mark in self.marks().items() if mark != before.get(name)}

    def buffers(self) -> Arrays:
        """Returns the state that an update may change: that of a torch program."""
        return {}

    def optimizer_slots(self) -> Arrays:
        """Returns what the optimizer alone keeps after a step, `KEY/N` of a tensor and `KEY/` of
        none: the norm of what has the tensor's shape, and its inner products with the gradient and
        the weights, which do not depend on the layout; a number as it is, and of other shapes the
        norm."""
        return {}

    def kept_values(self, also: Sequence[str] = ()) -> Arrays:
        """Returns the arrays of the variables that `update` has changed so far.

        Args:
            also: variables that another program's changes.
        """
        return {}

    def kept_by_update(self) -> list[str]:
        """Returns the program's variables that `update` changes, such as averaged weights."""
        return sorted(self.kept)

    def lacks_optimizer(self) -> str:
        return "" if self.user.has("optimizer") else f"no optimizer(model) in {self.user.name}"


def _is_rounding(x: np.ndarray, y: np.ndarray) -> bool:
    """Says if one holds what is another computed in float32, and is not drawn again."""
    largest = np.abs(x[np.isfinite(x)]).max(initial=0.0)
    return np.allclose(x, y, rtol=0, atol=DRAWN * largest, equal_nan=True)


def _largest_gap(a: tuple[float, Arrays], b: tuple[float, Arrays]) -> float:
    """Returns the relative gap of two losses, or the largest of their gradients; 0 for rounding."""
    size = sum(float(np.linalg.norm(x)) ** 2 for x in a[1].values()) ** 0.5 or 1.0
    gaps = [float(relative_gaps(np.array([a[0]]), np.array([b[0]]))[0])]
    for name, x in a[1].items():
        own = max(float(np.linalg.norm(x)), LEAST_SIZE * size)
        gaps.append(float(np.linalg.norm(x - b[1][name])) / own)
    largest = max(gaps)
    return largest if largest > LEAST_GAP and np.isfinite(largest) else 0.0
