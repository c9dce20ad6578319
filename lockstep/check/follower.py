"""Follows data through both programs' operations, for whoever asks where values part."""

from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from lockstep.check import layout
from lockstep.check.following.follow import OPEN, Followed, Parted, follow, follow_mapped
from lockstep.check.following.tapes import EQUAL, Asked, LiveTape, RecordedTape
from lockstep.check.layout import Entry
from lockstep.check.sides.port import Port
from lockstep.check.sides.trace import Trace
from lockstep.errors import UserError
from lockstep.model.params import Arrays
from lockstep.worker import Say, silent
from lockstep_recorder.recording import prefixed

T = TypeVar("T")
CLOSE = 1e-13  # relative: of the values of a batch whose loss alone may show what differs


class Follower:
    """Follows data through both programs' operations; what was asked for once is kept."""

    def __init__(self, reference: Trace, port: Port, say: Say = silent) -> None:
        self.reference, self.port, self.say = reference, port, say
        self.lacks = "" if port.isolates else "a trace cannot be fed the reference's values"

    @cached_property
    def tapes(self) -> tuple[RecordedTape, LiveTape] | None:
        """Both tapes with the first batch; None where one cannot be made, and `lacks` says why."""
        if self.lacks:
            return None
        about, arrays = self.reference.about.get("tape", {}), self.reference.arrays
        return self._try(lambda: (self._recorded(about, arrays), self._live(0)))

    @cached_property
    def found(self) -> Followed | None:
        """The pairs that values show; None where data cannot be followed, and `lacks` says why."""
        if self.tapes is None:
            return None
        self.say("following the data through both programs")
        theirs, ours = self.tapes
        buffers = _buffers(self.port.facts, self.port.initial)
        return self._try(lambda: follow(theirs, ours, self.reference.weights, buffers))

    def parted(self, entries: list[Entry], weights: Arrays) -> Parted | None:
        """Finds where values part under a mapping; None where data cannot be followed.

        Args:
            weights: the port's, which it makes of the reference's.
        """
        if self.tapes is None:
            return None
        theirs, ours = self.tapes
        return self._try(lambda: self._parted(theirs, ours, entries, weights, EQUAL))

    def parted_of_batch(
        self, program: Asked, step: int, entries: list[Entry], weights: Arrays
    ) -> Parted:
        """Finds where values part with another batch than the first.

        Args:
            program: the reference's, started once more.
        """
        batch, spec = self.reference.group(f"batch/{step}"), self.reference.about["batch"]
        given = prefixed("weights", self.reference.weights) | prefixed("batch", batch)
        program.ask("widen", given, batch=spec)
        about, arrays = program.ask("tape of a batch", given, batch=spec)
        theirs = self._recorded(about, prefixed("tape", arrays))
        return self._parted(theirs, self._live(step), entries, weights, CLOSE)

    def _parted(
        self, theirs: RecordedTape, ours: LiveTape, entries: list[Entry], weights: Arrays,
        tolerance: float,
    ) -> Parted:  # fmt: skip
        known = self.reference.weights
        places = {name: np.full(x.shape, OPEN) for name, x in known.items()}
        for name, start in zip(theirs.names, theirs.starts):
            places[name] = start + np.arange(known[name].size).reshape(known[name].shape)
        shifted = {name: x - OPEN for name, x in places.items()}  # what no entry fills is zero
        partners = layout.to_port(entries, shifted, self.port.shapes)
        partners = {name: x + OPEN for name, x in partners.items()}
        return follow_mapped(theirs, ours, known, partners, weights, tolerance)

    def _recorded(self, about: dict[str, Any], arrays: Arrays) -> RecordedTape:
        tape = RecordedTape(about, arrays)
        tape.add_buffers(_buffers(self.reference.about, self.reference.weights))
        return tape

    def _live(self, step: int) -> LiveTape:
        port, batch = self.port, prefixed("batch", self.reference.group(f"batch/{step}"))
        tape = LiveTape(port.program, port.initial, batch, self.reference.about["batch"])
        tape.add_buffers(_buffers(port.facts, port.initial))
        return tape

    def _try(self, find: Callable[[], T]) -> T | None:
        try:
            return find()
        except Exception as error:  # whatever happens here, the verdict stands
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            self.lacks = f"{kind}{error}"
            return None


def _buffers(facts: dict[str, Any], weights: Arrays) -> Arrays:
    return {name: x for name, x in weights.items() if name not in facts["parameters"]}
