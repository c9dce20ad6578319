"""Tokens in files, mapped and not read."""

import os
from pathlib import Path

import numpy as np

from lockstep.errors import UserError, require
from lockstep.files.untrusted import Refused, open_regular


def map_file(data: str, path: Path, dtype: str) -> np.ndarray:
    """Map a file into memory, (items,), read-only.

    Raises:
        UserError: it is no regular file, is empty, or has a part of an item at its end.
    """
    try:
        with open_regular(path, links=True) as file:
            size = os.fstat(file.fileno()).st_size
            require(size > 0, "--data", data, f"{path.name} is empty; use other data")
            kind = np.dtype(dtype)
            remedy = f"{path.name} has {size} bytes, not whole {kind.name} tokens; write it again"
            require(size % kind.itemsize == 0, "--data", data, remedy)
            return np.memmap(file, dtype=kind, mode="r")
    except Refused as why:
        raise UserError(f"--data {data}: {path.name} is {why}; use other data") from None
