"""Tools of a probe inside its framework's process; imports nothing but the standard library."""

import time
import timeit
from collections.abc import Callable
from typing import Any

SECONDS = 0.1  # spent on timing one call


def gather(*readers: Callable[[], Any]) -> dict[str, Any]:
    """Collects what each reader returns, by its name; one that raises does not lose the others'."""
    found: dict[str, Any] = {}
    unread: dict[str, str] = {}
    for read in readers:
        try:
            found[read.__name__] = read()
        except Exception as error:
            unread[read.__name__] = f"{type(error).__name__}: {error}"
    return found | {"unread": unread}


def fastest(call: Callable[[], Any]) -> float:
    """Measures the seconds of the quickest call after one warm-up call."""
    call()
    end = time.perf_counter() + SECONDS
    best = timeit.timeit(call, number=1)
    while time.perf_counter() < end:
        best = min(best, timeit.timeit(call, number=1))
    return best
