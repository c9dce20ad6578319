"""Measurements with a fault, which a job calls by name."""

import errno
import importlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.errors import UserError
from lockstep.files import durable

REFUSED = "XlaRuntimeError: INTERNAL: CUDNN_STATUS_NOT_SUPPORTED in cudnnFinalize"


def _raise(error: Exception) -> Any:
    raise error


def _fill_disk() -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    durable.replace = lambda path, text: _raise(full)


FAULTS: dict[str, Callable[[], Any]] = {
    "kernel": lambda: _raise(RuntimeError(REFUSED)),
    "memory": lambda: _raise(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")),
    "policy": lambda: _raise(UserError("--policy fp16: not on this device; use bf16")),
    "wheel": lambda: importlib.import_module("no_such_wheel"),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crash": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "silence": lambda: os._exit(0),
    "disk": _fill_disk,
    "none": lambda: None,
}


def measure(fault: str) -> dict[str, Any]:
    FAULTS[fault]()
    return {"figure": 1.0}


def sleep(file: str) -> None:
    """Writes its process's number, and never ends."""
    Path(file).write_text(f"{os.getpid()}\n")
    time.sleep(3600)
