"""Writes checkpoints in a thread; training waits only for the copy to the host."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lockstep.errors import UserError
from lockstep.model.state import TrainState
from lockstep.run import checkpoint
from lockstep.run.runlog import RunLog


class Write(NamedTuple):
    step: int
    future: Future[Path]


class Saver:
    """A writer of checkpoints: one is written at a time, and at most one waits, the newest."""

    def __init__(self, run: Path, keep: int, log: RunLog, say: Callable[[str], None]) -> None:
        """
        Args:
            say: gets one line for each checkpoint that is not written.
        """
        self.run, self.keep, self.log, self.say = run, keep, log, say
        self.writer = ThreadPoolExecutor(max_workers=1)
        self.writes: list[Write] = []  # not reported yet, oldest first

    def save(self, state: TrainState, losses: Mapping[int, float]) -> None:
        """Starts to write a state, which the caller must not change; waits for nothing.

        Args:
            losses: the validation losses known so far, by step; the best one's checkpoint stays.
        """
        self.report()
        for step, waiting in self.writes:
            if waiting.cancel():
                self.say(f"step {step} is not saved: an earlier checkpoint is still being written")
        self._begin(state, losses)

    def finish(self, state: TrainState, losses: Mapping[int, float]) -> None:
        """Write a run's last state, and wait for all that is being written.

        Raises:
            UserError: the last state could not be written.
        """
        self._begin(state, losses)
        self.writer.shutdown()
        last = self.writes.pop()
        self.report()
        if problem := self._problem(last):
            raise UserError(problem)

    def _begin(self, state: TrainState, losses: Mapping[int, float]) -> None:
        future = self.writer.submit(self._write, state, dict(losses))
        self.writes.append(Write(state.step, future))

    def _write(self, state: TrainState, losses: Mapping[int, float]) -> Path:
        bad = [name for name, weight in state.params.items() if not np.isfinite(weight).all()]
        if bad:  # nobody should resume from them
            raise UserError(f"{bad[0]}: its weights are not finite; lower --lr")
        self.log.sync()  # first: no checkpoint is without its rows
        return checkpoint.save(self.run, state, keep=self.keep, losses=losses)

    def report(self) -> None:
        """Reports the writes that failed since the last call."""
        for write in [write for write in self.writes if write.future.done()]:
            self.writes.remove(write)
            if problem := self._problem(write):
                self.say(f"{problem}; training goes on, the next save tries again")

    def _problem(self, write: Write) -> str:
        """Returns why a write failed, or ""; raises errors that are no UserError."""
        if not write.future.cancelled():
            try:
                write.future.result()
            except UserError as error:
                return f"step {write.step} is not saved: {error}; {checkpoint.newest(self.run)}"
        return ""

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, *exc: object) -> None:
        self.writer.shutdown()  # whatever ends the run, a write that has begun ends
