"""`python -m parity_tests.benchmarks.faulty CONTENT NAME FILE`: a measurement with a fault, the one
that its cell's table names; of any other table it is well, and a fake."""

import errno
import importlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.cells import Cell
from lockstep.errors import UserError
from lockstep.exits import exit_status
from lockstep.files import durable

REFUSED = "XlaRuntimeError: INTERNAL: CUDNN_STATUS_NOT_SUPPORTED in cudnnFinalize"


def _raise(error: Exception) -> Any:
    raise error


def _fill_disk() -> dict[str, Any]:
    durable.replace = _full
    return {}


def _full(path: Path, text: str) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


FAULTS: dict[str, Callable[[], Any]] = {
    "kernel": lambda: _raise(RuntimeError(REFUSED)),
    "memory": lambda: _raise(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")),
    "policy": lambda: _raise(UserError("--policy fp16: not on this device; use bf16")),
    "wheel": lambda: importlib.import_module("no_such_wheel"),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crash": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "silence": lambda: os._exit(0),
    "disk": _fill_disk,
}


def fake(cell: Cell) -> dict[str, Any]:
    return FAULTS.get(cell.table, dict)() or {"tokens_per_second": 1.0, "final_loss": 1.0}


if __name__ == "__main__":
    measure.measure = fake  # type: ignore[assignment]
    sys.exit(exit_status(measure.main))
