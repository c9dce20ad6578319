"""The port as the rungs see it: the reference's weights in its own layout, and what comes back."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.check import layout
from lockstep.check.names import segments
from lockstep.check.pairing.entries import Mapping
from lockstep.check.pairing.tensors import Tensors
from lockstep.check.sides.modules import Calls, module_of
from lockstep.check.sides.program import UserProgram
from lockstep.check.sides.trace import Trace
from lockstep.errors import UserError
from lockstep.model.params import Arrays
from lockstep_recorder.noise import NUDGES, NudgedWeights
from lockstep_recorder.recording import SHARE, moments, prefixed, shipped
from lockstep_recorder.wire import group

GROUPS = ("in", "act", "dact")


@dataclass(frozen=True)
class PortRun:
    loss: float
    calls: Calls
    grads: Arrays
    state: Arrays
    outputs: Arrays  # what the program ships, see `recording.shipped`
    slots: dict[str, str]  # by name of an output, where the run has it


class Port:
    """Asks the port's program questions in the reference's batches."""

    isolates = True  # its modules can be fed what the reference had
    mends = False  # torch's clip has no epsilon

    def __init__(self, program: UserProgram, reference: Trace) -> None:
        self.program, self.reference = program, reference
        self.facts, self.initial = program.ask("facts")
        self.batch = reference.about["batch"]
        first = prefixed("batch", reference.group("batch/0"))
        precision, constants = program.ask(
            "widen", prefixed("weights", self.initial) | first, batch=self.batch
        )
        self.facts |= precision
        self.initial |= constants
        self.shapes = {name: x.shape for name, x in self.initial.items()}
        self.mapping: Mapping | None = None
        self.first: PortRun | None = None  # on its own weights
        self.trained: Arrays = {}  # variables that updates change, after a loss curve
        self.keeps = set[str]()  # variables that an update changes, its own or the reference's
        self.own: Arrays = {}  # gradients of its tensors of which one side alone has any

    @property
    def precision(self) -> str:
        return self.facts["precision"]

    def weights(self, reference: Arrays) -> Arrays:
        """Makes the port's weights of the reference's; its own stay where nothing fits."""
        assert self.mapping
        return self.initial | layout.to_port(self.mapping.entries, reference, self.shapes)

    def grads(self, reference: Arrays) -> Arrays:
        """Makes the port's gradients; a tied one goes to its only tensor, not to its copies. Where
        one side alone has a gradient, the port is fed its own, which may be none, in the scale of
        the reference's."""
        assert self.mapping
        zeros = {name: np.zeros(self.shapes[name]) for name in self.facts["parameters"]}
        entries = [e for e in self.mapping.entries
                   if e.reference.name in reference and e.port.name in zeros]  # fmt: skip
        sizes = [norm_of(reference), norm_of(self.reference.group("grad"))]
        scale = sizes[0] / sizes[1] if sizes[1] else 1.0
        own = {name: scale * x for name, x in self.own.items()}
        return zeros | layout.to_port(entries, reference, self.shapes) | own

    def run(self, weights: Arrays, *, forced: Arrays | None = None, step: int = 0) -> PortRun:
        arrays = prefixed("weights", weights)
        arrays |= prefixed("batch", self.reference.group(f"batch/{step}"))
        arrays |= prefixed("forced", forced or {})
        header, seen = self.program.ask("run", arrays, batch=self.batch)
        kept = {name: x for name, x in seen.items() if name.partition("/")[0] in GROUPS}
        calls = Calls(header["events"], header["kinds"], kept, aliases_of(self.facts["tied"]))
        slots = shipped(header, seen)
        outputs = {name: seen[key] for name, key in slots.items()}
        return PortRun(
            header["loss"], calls, group(seen, "grad"), group(seen, "state"), outputs, slots
        )

    def evaluated(self, weights: Arrays) -> Arrays:
        """Gets what it ships in evaluation, of the first batch; nothing without such a mode."""
        given = prefixed("weights", weights) | prefixed("batch", self.reference.group("batch/0"))
        return self.program.ask("evaluate", given, batch=self.batch)[1]

    def moments(self, piece: layout.Piece) -> dict[str, Any]:
        """Measures the values that `build` left."""
        x = piece.take(self.initial)
        return {**moments(x), "size": x.size}

    def begin(self, weights: Arrays) -> str:
        """Begins a fresh optimizer; returns why there is none, or ""."""
        given = prefixed("weights", weights)
        return self.program.ask("begin", given, mends=self.mends)[0]["lacks"]

    def update(self, weights: Arrays, grads: Arrays, label: str, step: int) -> Arrays:
        """Gets what one step adds to the tensors, fed the reference's gradients."""
        given = prefixed("weights", weights) | prefixed("grad", self.grads(grads))
        after = self.program.ask("update", given, step=step, mends=self.mends)[1]
        return {name: difference(after[name], x) for name, x in weights.items()}

    def kept(self) -> Arrays:
        """Gets the arrays of the variables that its or the reference's `update` changes."""
        return self.program.ask("kept", names=self.reference.about.get("kept", []))[1]

    def batches(self, steps: int) -> tuple[Any, Arrays]:
        """Gets the nest, `STEP/PATH` and the arrays of its own first batches; nothing if it has no
        function `batch`, or if that raises."""
        try:
            header, found = self.program.ask("batches", steps=steps)
        except UserError:
            return None, {}
        return header["batch"], group(found, "batch")

    def limits(self) -> dict[str, Any]:
        """Gets what its runs have not shown: `conditions` that always came out alike, see
        `lockstep_recorder.conditions`, and `sets`, variables that JAX sets while it traces."""
        return self.program.ask("limits")[0]

    def alone(self, weights: Arrays, grads: Arrays, steps: int) -> Trace:
        """Returns for each tensor what each of many steps moves it by, see `recording.alone`."""
        given = prefixed("weights", weights) | prefixed("grad", self.grads(grads))
        header, moved = self.program.ask("alone", given, steps=steps, mends=self.mends,
                                         names=self.reference.about.get("kept", []))  # fmt: skip
        self.facts |= header
        self.keeps |= {name.partition("/")[0] for name in group(moved, "kept left")}
        return Trace(header, moved)

    def accumulate(self, weights: Arrays, steps: int) -> tuple[list[float], Trace]:
        """Returns the losses of the first batches, and the arrays of `recording.accumulate`."""
        arrays = prefixed("weights", weights) | self._batches(steps)
        arrays[SHARE] = self.reference.arrays.get(SHARE, np.ones(steps))
        header, found = self.program.ask("accumulate", arrays, batch=self.batch, steps=steps)
        return header["losses"], Trace({}, found)

    def noise(self, weights: Arrays, steps: int) -> dict[str, float]:
        """Measures for each array how far the program parts from itself, as a recording does."""
        arrays = prefixed("weights", weights) | self._batches(steps)
        return self.program.ask("noise", arrays, batch=self.batch, steps=steps)[0]["noise"]

    def train(self, weights: Arrays, steps: int) -> list[float]:
        arrays = prefixed("weights", weights) | self._batches(steps)
        header, self.trained = self.program.ask(
            "train", arrays, batch=self.batch, steps=steps, mends=self.mends,
            names=self.reference.about.get("kept", []),
        )  # fmt: skip
        return list(header["losses"])

    def envelope(self, weights: Arrays, losses: np.ndarray) -> np.ndarray:
        """Measures by step how far losses part where weights move by an ulp, as a recording
        does."""
        moved = (NudgedWeights(weights, seed, self.facts["narrowest"]) for seed in range(NUDGES))
        gaps = [np.abs(self.train({**each}, len(losses)) - losses) for each in moved]
        return np.array(np.max(gaps, 0))

    def _batches(self, steps: int) -> Arrays:
        found: Arrays = {}
        for step in range(steps):
            here = f"batch/{step}"
            found |= prefixed(here, self.reference.group(here))
        return found


def difference(after: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Returns what was added; nothing to what has stayed, such as the minus infinity of a mask."""
    return np.subtract(after, before, out=np.zeros(after.shape), where=after != before)


def norm_of(arrays: Arrays) -> float:
    """Returns the norm of all arrays, taken together."""
    return float(np.sqrt(sum(np.square(x).sum() for x in arrays.values())))


def aliases_of(tied: list[list[str]]) -> dict[str, list[str]]:
    return {names[0]: names[1:] for names in tied}


def tensors_of(
    about: dict[str, Any], weights: Arrays, events: list[str], kinds: dict[str, str]
) -> Tensors:
    """Lists one side's tensors as the mapping sees them, in the order of calls."""
    modules = {**about["modules"], **{module_of(c): k for c, k in kinds.items()}}
    owner = {name: ".".join(segments(name)[:-1]) for name in weights}
    called = {module_of(e[1:]): at for at, e in reversed(list(enumerate(events))) if e[0] == "+"}
    own = {name: at for at, name in enumerate(weights)}
    order = sorted(weights, key=lambda n: (called.get(owner[n], len(events)), own[n]))
    tied = {alias: names[0] for names in about["tied"] for alias in names[1:]}
    return Tensors(
        {name: x.shape for name, x in weights.items()},
        {name: modules.get(owner[name] or "(root)", "") for name in weights},
        order, about["framework"], set(about["parameters"]), tied,
    )  # fmt: skip
