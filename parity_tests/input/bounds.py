"""A limit of time and of memory for a piece of code, in this process."""

import contextlib
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

ROOM = 200 << 20  # bytes; the largest header that is read becomes some 100 MiB of objects
SECONDS = 5.0  # a hundred times what the slowest case takes here, for other machines


class TooSlow(BaseException):
    """No `except Exception` takes it for a refusal."""


@contextlib.contextmanager
def bounded(room: int = ROOM, seconds: float = SECONDS) -> Iterator[None]:
    """Raises MemoryError where more is allocated than `room` bytes, TooSlow after `seconds`."""
    statm = Path("/proc/self/statm")  # elsewhere than on Linux the time alone is bounded
    former = resource.getrlimit(resource.RLIMIT_AS)
    if statm.exists():
        now = int(statm.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (now + room, former[1]))
    handler = signal.signal(signal.SIGALRM, _too_slow)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, former)


def _too_slow(number: int, frame: object) -> None:
    raise TooSlow
