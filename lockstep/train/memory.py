"""Memory of this process, where no allocator counts it."""

import resource
import sys
from pathlib import Path

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident_peak() -> int:
    """Bytes: the largest resident set so far (`getrusage`, which counts KiB on Linux)."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class ResidentGrowth:
    """How far the resident set rises above what it is when this is made.

    Linux alone can forget a former peak (proc(5): clear_refs); elsewhere `bytes` is None.
    """

    def __init__(self) -> None:
        self.level: int | None = None
        try:
            CLEAR.write_text("5")
            self.level = _kibibytes("VmRSS")
        except OSError:
            pass

    def bytes(self) -> int | None:
        return None if self.level is None else 1024 * (_kibibytes("VmHWM") - self.level)


def _kibibytes(field: str) -> int:
    (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1])
