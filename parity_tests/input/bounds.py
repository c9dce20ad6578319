"""Limit the CPU time and the memory of a piece of code, in this process."""

import contextlib
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import LONGEST, UserError

ROOM = 200 << 20  # bytes; the largest header that is read becomes some 100 MiB of objects
SECONDS = 2.0  # of this process's CPU time, so that no other process decides
PATIENCE = 120.0  # seconds by the clock, to end code that computes nothing, as at a FIFO


class TooSlow(BaseException):
    """No `except Exception` takes it for a refusal."""


@contextlib.contextmanager
def limit(room: int = ROOM, seconds: float = SECONDS, patience: float = PATIENCE) -> Iterator[None]:
    """Raise MemoryError where more than `room` bytes are allocated, TooSlow where it takes longer.

    Args:
        room: bytes, beside what the process has already.
        seconds: CPU time.
        patience: wall-clock seconds.
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


def check_message(error: UserError) -> str:
    """The message, which is one line that a terminal can show."""
    line = str(error)
    assert line.isprintable() and 0 < len(line) <= LONGEST + 5, line
    return line


def check_refusal(read: Callable[[], Any], *words: str, seconds: float = SECONDS) -> None:
    """Check that a reader refuses its input in one line with these words, within the limits."""
    with limit(seconds=seconds), pytest.raises(UserError) as caught:
        read()
    line = check_message(caught.value)
    for word in words:
        assert word in line, (word, line)
