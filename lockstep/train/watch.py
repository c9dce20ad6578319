"""Heartbeats of a run's processes: each counts up, and one whose count stops is missing.

An exchange may take as long as a save or a compilation does; a process that is stopped or dead
ends the run all the same.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from lockstep.exits import MISTAKE

BEAT = 2.0  # seconds
PATIENCE = 11  # beats
FAILED = 6  # after an exchange that failed
LEFT = -1  # the count of a process that has ended as it should


class Watch:
    """A heartbeat in two threads: one talks to the keeper of the counts, the other checks beats.

    Beats and not seconds: a machine that is suspended has not lost its processes.
    """

    def __init__(
        self,
        beat: Callable[[int], Sequence[int]],
        end: Callable[[list[int]], Any],
        *,
        patience: int = PATIENCE,
    ) -> None:
        """
        Args:
            beat: tells this process's count, and returns those of all; nobody's for one process.
            end: called with the numbers of the processes that are missing.
        """
        self.beat, self.end, self.patience = beat, end, patience
        self.counts = beat(0)
        self.silent = [0] * len(self.counts)  # beats since a process has counted
        self.over = threading.Event()

    def __enter__(self) -> "Watch":
        if self.counts:
            for loop in (self._tell, self._look):
                threading.Thread(target=loop, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.over.set()
        if exc[0] is None:
            with suppress(RuntimeError):  # who keeps the counts may have left before
                self.beat(LEFT)

    def missing(self) -> list[int]:
        """Finds, after a failed exchange, the processes that do not count within some seconds."""
        found: list[int] = []
        for _ in range(FAILED if self.counts else 0):
            time.sleep(BEAT)
            if found := self._silent_for(3):
                break
        return found

    def _silent_for(self, beats: int) -> list[int]:
        """Finds the ranks that are gone; if no count changes, not even our own, it is rank 0."""
        missing = [rank for rank, n in enumerate(self.silent) if n >= beats]
        return missing if len(missing) < len(self.silent) else [0]

    def _tell(self) -> None:
        count = 0
        while not self.over.wait(BEAT):
            count += 1
            with suppress(RuntimeError):  # who keeps the counts is gone, or will be back
                self.counts = self.beat(count)

    def _look(self) -> None:
        known = self.counts
        while not self.over.wait(BEAT):
            counts = self.counts
            pairs = zip(self.silent, known, counts, strict=True)
            self.silent = [n + 1 if old == new != LEFT else 0 for n, old, new in pairs]
            known = counts
            if missing := self._silent_for(self.patience):
                self.end(missing)


def end_process(line: str) -> None:
    """Ends this process at once, because another thread may wait for a dead rank."""
    print(line, file=sys.stderr, flush=True)
    os._exit(MISTAKE)
