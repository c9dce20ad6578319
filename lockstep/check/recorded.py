"""A port that was recorded: its trace answers in place of its program, and cannot be fed."""

from pathlib import Path
from typing import Any

import numpy as np

from lockstep.check import layout, report
from lockstep.check.align import pair_tensors
from lockstep.check.roots.lines import Follower
from lockstep.check.rungs import labels_of
from lockstep.check.sides.modules import Calls
from lockstep.check.sides.port import Port, PortRun, aliases_of, difference
from lockstep.check.sides.program import UserProgram
from lockstep.check.sides.trace import Trace
from lockstep.errors import UserError, require
from lockstep.files import durable
from lockstep.judge.compare import norm_gap
from lockstep.judge.tolerances import NORM
from lockstep.model.params import Arrays
from lockstep_recorder.main import write
from lockstep_recorder.recording import SHARE, VARIED, shipped

REMEDY = "record it with `lockstep record PORT --like REFERENCE.trace -o PORT.trace`"


class RecordedPort(Port):
    """Comparable where it started from the reference's weights, and saw its batches."""

    isolates = False

    def __init__(self, recorded: Trace, reference: Trace) -> None:
        self.recorded, self.reference = recorded, reference
        self.facts, self.initial = recorded.about, recorded.weights
        self.shapes = {name: x.shape for name, x in self.initial.items()}
        self.mapping = self.first = None
        self.own, self.trained = {}, recorded.group("kept trained")
        self.keeps = {*recorded.about.get("kept", [])}

    def run(self, weights: Arrays, *, forced: Arrays | None = None, step: int = 0) -> PortRun:
        """Raises UserError where the recording started from other weights."""
        about = self.facts
        for name, x in weights.items():
            alike = norm_gap(x, self.initial[name]) <= NORM.bound
            whose = f"{about['program']}: the trace's"
            require(alike, whose, name, f"is not the reference's; {REMEDY}")
        calls = Calls(about["events"], about["kinds"], self.recorded.arrays,
                      aliases_of(about["tied"]))  # fmt: skip
        group = self.recorded.group
        slots = shipped(about, self.recorded.arrays)
        outputs = {name: self.recorded.arrays[key] for name, key in slots.items()}
        return PortRun(about["loss"], calls, group("grad"), group("state"), outputs, slots)

    def evaluated(self, weights: Arrays) -> Arrays:
        return self.recorded.group("evaluated")

    def moments(self, piece: layout.Piece) -> dict[str, Any]:
        """Returns the moments of the whole tensor."""
        return {**self.facts["initial"][piece.name], "size": self.initial[piece.name].size}

    def begin(self, weights: Arrays) -> str:
        if lacks := self.facts["lacks"].get("optimizer", ""):
            return str(lacks)
        fed = self.recorded.group("fed/1/0/grad")
        ours = self.grads(self.reference.group("fed/1/0/grad"))
        if any(name not in fed or not np.array_equal(x, fed[name]) for name, x in ours.items()):
            return f"its optimizer was fed other gradients; {REMEDY}"
        return ""

    @property
    def _steps(self) -> Trace:
        """The recording of its optimizer, with torch's clip mended where that is asked for."""
        if self.mends and "mended" in self.facts:
            return self.recorded.with_steps(self.facts["mended"], self.recorded.group("mended"))
        return self.recorded

    def update(self, weights: Arrays, grads: Arrays, label: str, step: int) -> Arrays:
        before, after = (self._steps.group(f"fed/{label}/{s}/weights") for s in (step, step + 1))
        none = labels_of(self.recorded).get(label, 0) <= step
        return {name: np.zeros(shape) if none else difference(after[name], before[name])
                for name, shape in self.shapes.items()}  # fmt: skip

    def kept(self) -> Arrays:
        return self.recorded.group("kept")

    def batches(self, steps: int) -> tuple[Any, Arrays]:
        return None, {}

    def limits(self) -> dict[str, Any]:
        return self.facts

    def alone(self, weights: Arrays, grads: Arrays, steps: int) -> Trace:
        self.facts |= {"ended": self._steps.about.get("ended", "")}
        slots = self._steps.group("slot").items()
        moved = {f"{kind}/{name}": x[:steps] for kind in VARIED
                 for name, x in self._steps.group(kind).items()}  # fmt: skip
        moved |= {n: x for n, x in self.recorded.arrays.items()
                  if n.startswith(("left/", "kept left/", "kept after/", "asked/"))}  # fmt: skip
        return Trace({}, moved | {f"slot/{name}": x for name, x in slots})

    def accumulate(self, weights: Arrays, steps: int) -> tuple[list[float], Trace]:
        return self.facts["accumulated"], self.recorded

    def train(self, weights: Arrays, steps: int) -> list[float]:
        return list(self._steps.about.get("losses", []))[:steps]

    def envelope(self, weights: Arrays, losses: np.ndarray) -> np.ndarray:
        return np.array(self.facts["envelope"])


def require_same_batches(port: Trace, reference: Trace, name: str) -> None:
    theirs, ours = (trace.group("batch") for trace in (reference, port))
    alike = theirs.keys() == ours.keys() and all(
        np.array_equal(x, ours[n], equal_nan=True) for n, x in theirs.items())  # fmt: skip
    if not alike:
        raise UserError(f"{name}: has other batches than the reference; {REMEDY}")


def record_like(program: UserProgram, reference: Trace, out: Path) -> None:
    """Records a port on the reference's weights, batches and gradients.

    Raises:
        UserError: the port does, or `out` cannot be written.
    """
    port = Port(program, reference)
    made = pair_tensors(reference, port, {}, Follower(reference, port)).mapping
    given = {f"weights/{n}": x for n, x in port.weights(reference.weights).items()}
    given |= {n: x for n, x in reference.arrays.items() if n.startswith("batch/") or n == SHARE}
    for label, steps in labels_of(reference).items():
        for step in range(steps):
            here = f"fed/{label}/{step}/grad"
            given |= {f"{here}/{n}": x for n, x in port.grads(reference.group(here)).items()}
    steps = len(reference.about.get("losses", []))
    about, arrays = program.ask("record", given, batch=port.batch, steps=steps)
    about = {name: value for name, value in about.items() if name not in ("names", "body")}
    mapping = {"tensors": report.tensors_json(made)}
    own = {"program": Path(program.name).name, "seed": reference.about["seed"], "mapping": mapping}
    with durable.writing(f"--out {out}"):
        write(str(out), {**own, **about}, arrays)
