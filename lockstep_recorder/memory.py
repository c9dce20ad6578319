"""How a large program fits: its arrays are kept in a file, and freed memory is given back."""

from __future__ import annotations

import contextlib
import ctypes
import tempfile
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np

SMALL, LARGE = 1_000_000, 20_000_000  # elements of a program's tensors
LEAST = 1 << 20  # bytes of an array that goes to the file
MMAP_THRESHOLD = -3  # a parameter of glibc's mallopt


def is_large(weights: Mapping[str, np.ndarray]) -> bool:
    return sum(x.size for x in weights.values()) >= LARGE


def give_back() -> None:
    """Lets freed arrays go back to the system, where the C library is glibc: else it keeps those
    of up to 32 MB for itself."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, LEAST)


class Spilled(dict[str, np.ndarray]):
    """Arrays by name; a large one is a view of a file without a name, which ends with the views.

    An array that is such a view already is not written again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.file = tempfile.TemporaryFile(prefix="lockstep-record-")  # noqa: SIM115
        weakref.finalize(self, self.file.close)
        self.end = 0

    def __setitem__(self, name: str, x: np.ndarray) -> None:
        large = x.nbytes >= LEAST and not isinstance(x, np.memmap)
        super().__setitem__(name, self._written(x) if large else x)

    def update(self, arrays: Mapping[str, np.ndarray]) -> None:  # type: ignore[override]
        for name, x in arrays.items():
            self[name] = x

    def _written(self, x: np.ndarray) -> np.ndarray:
        whole: Any = np.ascontiguousarray(x)
        self.file.seek(self.end)
        self.file.write(whole.reshape(-1).view(np.uint8).data)
        self.file.flush()
        start, self.end = self.end, -(-(self.end + x.nbytes) // 64) * 64
        return np.memmap(self.file, x.dtype, "r+", start, x.shape)
