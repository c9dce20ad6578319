"""Peak memory of this process, where no allocator counts it."""

import resource
import sys


def resident_peak() -> int:
    """Bytes: the largest resident set so far (`getrusage`, which counts KiB on Linux)."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
