"""Runs a twin's probe in a process of its own, which may crash, hang or print anything."""

import json
import signal
import subprocess
from typing import Any

from lockstep import twin
from lockstep.doctor.facts import Device, Framework
from lockstep.process import ONE_THREAD, last_line, run_module

SECONDS = 120  # a first import from a slow disk takes a minute
# Threads that wait for a busy core would be timed; a look must not take the GPU's memory.
ENVIRONMENT = {**ONE_THREAD, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def ask(name: str, seconds: float = SECONDS) -> Framework:
    """The facts that a framework reports, or its fault."""
    try:
        done = run_module(
            probe(name), changes=ENVIRONMENT, stdin=subprocess.DEVNULL, capture_output=True,
            timeout=seconds,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Framework(name=name, fault="hang", error=f"no answer within {seconds:g} s")
    last = _printable(last_line(done.stderr.decode(errors="replace")))
    if found := _last_object(done.stdout):
        devices = tuple(map(_device, found.pop("devices", [])))
        return Framework(name=name, devices=devices, stderr=last, **found)
    if done.returncode < 0:
        number = -done.returncode
        error = f"killed by signal {number} ({signal.strsignal(number)})"
        return Framework(name=name, fault="crash", error=error)
    if done.returncode == 0:
        return Framework(name=name, fault="no facts", error="it ended without reporting its facts")
    error = last or f"it ended with status {done.returncode}"
    return Framework(name=name, fault=_kind(last), error=error)


def probe(name: str) -> str:
    """The module in the framework's twin that prints its facts."""
    return twin.MODULES[name].partition(".")[0] + ".inspect.probe"


def _last_object(output: bytes) -> dict[str, Any] | None:
    """The probe's own line; a framework may have printed others around it."""
    for line in reversed(output.decode(errors="replace").splitlines()):
        try:
            found = json.loads(line[line.find("{") :])
        except ValueError:
            continue
        if isinstance(found, dict) and "unread" in found:
            return found
    return None


def _device(found: dict[str, Any]) -> Device:
    capability = found.pop("capability")
    return Device(capability=tuple(capability) if capability else None, **found)


def _printable(line: str) -> str:
    return "".join(c for c in line if c.isprintable())[:300]


def _kind(line: str) -> str:
    if line.startswith("ModuleNotFoundError"):
        return "missing"
    if "XLA_FLAGS" in line:
        return "flags"
    broken = ".so" in line or "undefined symbol" in line
    return "libraries" if broken else "import"
