"""An exporter of ONNX that rotates the last place as the one before it: a planted bug.

An exporter has a process of its own, which a patch of another one does not reach.
"""

from typing import Any
from unittest import mock

import numpy as np

from lockstep.model import rotary
from torch_ref.io import onnx

right = rotary.table


def repeat_place(*given: Any) -> tuple[np.ndarray, ...]:
    return tuple(np.concatenate([x[:-1], x[-2:-1]]) for x in right(*given))


def export_forward(config: dict[str, Any], folder: str) -> None:
    with mock.patch.object(rotary, "table", repeat_place):
        onnx.export_forward(config, folder)
