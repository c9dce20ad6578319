"""Arrays of a recording that are kept in a file, so that memory holds what is in use."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np

LEAST = 1 << 20  # bytes of an array that goes to the file


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
        return np.memmap(self.file, x.dtype, "c", start, x.shape)
