"""Runs a twin's probe in a separate process, which may crash, hang or print anything."""

import signal
import subprocess
import tempfile
from functools import partial
from typing import IO, Any

from lockstep import twin
from lockstep.doctor.facts import DeviceReport, Framework
from lockstep.process import ONE_THREAD, last_line
from lockstep.worker import Failed, Worker, silent, start_service

SECONDS = 120  # a first import from a slow disk takes a minute
# Threads that wait for a busy core would be timed; a look must not take the GPU's memory.
ENVIRONMENT = {**ONE_THREAD, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def ask(name: str, seconds: float = SECONDS) -> Framework:
    """Returns the facts that a framework reports, or its fault."""
    with tempfile.TemporaryFile() as printed:
        heard: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": printed}
        connect = partial(start_service, probe(name), changes=ENVIRONMENT, **heard)
        worker = Worker("", connect, silent)
        try:
            found, _ = worker.ask("facts", seconds=seconds)
        except Failed as failed:
            fault, error = _fault(failed, _last_printed(printed))
            return Framework(name=name, fault=fault, error=error)
        finally:
            worker.close()
        last = _last_printed(printed)
    devices = tuple(map(_device, found.pop("devices", [])))
    return Framework(name=name, devices=devices, stderr=last, **found)


def _last_printed(file: IO[bytes]) -> str:
    file.seek(0)
    return _printable(last_line(file.read().decode(errors="replace")))


def _fault(failed: Failed, last: str) -> tuple[str, str]:
    """Returns the kind of a failure, and its line; `last` is the process's last output."""
    status = failed.status
    if failed.timed_out:
        return "hang", failed.text
    if status is None:
        return _kind(failed.text), _printable(failed.text)
    if status < 0:
        return "crash", f"killed by signal {-status} ({signal.strsignal(-status)})"
    if status == 0:
        return "no facts", "it ended without reporting its facts"
    return _kind(last), last or f"it ended with status {status}"


def probe(name: str) -> str:
    """Names the module in the framework's twin that prints its facts."""
    return twin.MODULES[name].partition(".")[0] + ".inspect.probe"


def _device(found: dict[str, Any]) -> DeviceReport:
    capability = found.pop("capability")
    return DeviceReport(capability=tuple(capability) if capability else None, **found)


def _printable(line: str) -> str:
    return "".join(c for c in line if c.isprintable())[:300]


def _kind(line: str) -> str:
    if line.startswith("ModuleNotFoundError"):
        return "missing"
    if "XLA_FLAGS" in line:
        return "flags"
    broken = ".so" in line or "undefined symbol" in line
    return "libraries" if broken else "import"
