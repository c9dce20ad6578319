"""A safetensors file -> arrays: read into memory, its checksum compared, then parsed.

The library would map the file, and one that is cut short meanwhile ends the process. Here what is
parsed is what was checked.
"""

import hashlib
import os
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np
from safetensors import SafetensorError, deserialize

from lockstep.files.untrusted import Refused, open_regular

DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
# Bytes: the deepest model (config.DEEPEST), with biases and checksums, has 4,400,000. The library
# takes up to 100 MB, of which it makes a GB of objects in 20 seconds.
HEADER_LIMIT = 6_000_000


class Damaged(Exception):
    """The bytes are not those of the checksum; the message is empty."""


def read(file: Path, sha256: str) -> dict[str, np.ndarray]:
    """The arrays by name, writable, in any order.

    Raises:
        Damaged: another file than that of the checksum, or one cut short.
        Refused: it has this checksum, and is no safetensors file of floats.
        OSError: it cannot be read.
    """
    with open_regular(file) as stream:
        content = stream.read(os.fstat(stream.fileno()).st_size)
    if hashlib.sha256(content).hexdigest() != sha256:
        raise Damaged
    length = int.from_bytes(content[:8], "little")
    if length > HEADER_LIMIT:
        raise Refused(f"a header of {length} bytes")
    try:
        return {name: _array(tensor) for name, tensor in deserialize(content)}
    except SafetensorError as error:
        raise Refused(str(error)) from None


def _array(tensor: dict[str, Any]) -> np.ndarray:
    dtype, shape = tensor["dtype"], tensor["shape"]
    if dtype not in DTYPES:
        raise Refused(f"a tensor of dtype {dtype}; only {', '.join(DTYPES)} are read")
    try:
        return np.frombuffer(tensor["data"], DTYPES[dtype]).reshape(shape)
    except ValueError as error:  # no elements, or more dimensions than numpy has
        raise Refused(f"a tensor of shape {str(shape)[:40]}: {error}") from None
