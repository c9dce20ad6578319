"""A limit of time and of memory for a piece of code, in this process."""

import contextlib
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

ROOM = 200 << 20  # bytes; the largest header that is read becomes some 100 MiB of objects
SECONDS = 5.0  # of this process's CPU time; the slowest case takes 1, on a slow machine perhaps 3
# Of the wall clock, for code that computes nothing, as at a FIFO: it would wait for ever.
PATIENCE = 120.0


class TooSlow(BaseException):
    """No `except Exception` takes it for a refusal."""


@contextlib.contextmanager
def limit(room: int = ROOM, seconds: float = SECONDS, patience: float = PATIENCE) -> Iterator[None]:
    """Raises MemoryError where more than `room` bytes are allocated, TooSlow where it takes longer.

    Args:
        seconds: CPU time, so that no other process decides.
    """
    statm = Path("/proc/self/statm")  # elsewhere than on Linux the time alone is bounded
    former = resource.getrlimit(resource.RLIMIT_AS)
    if statm.exists():
        now = int(statm.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (now + room, former[1]))
    clocks = ((signal.ITIMER_PROF, signal.SIGPROF), (signal.ITIMER_REAL, signal.SIGALRM))
    handlers = [signal.signal(number, _raise_too_slow) for _, number in clocks]
    for (clock, _), limit in zip(clocks, (seconds, patience)):
        signal.setitimer(clock, limit)
    try:
        yield
    finally:
        for (clock, number), handler in zip(clocks, handlers):
            signal.setitimer(clock, 0)
            signal.signal(number, handler)
        resource.setrlimit(resource.RLIMIT_AS, former)


def _raise_too_slow(number: int, frame: object) -> None:
    raise TooSlow
