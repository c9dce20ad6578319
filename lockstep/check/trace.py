"""A recorded reference: a folder with JSON and arrays, read as untrusted input."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.errors import UserError
from lockstep.files import tensors
from lockstep.files.untrusted import Refused, read_json
from lockstep.model.params import Arrays
from lockstep.parity.wire import group

FORMAT = 1
ABOUT, ARRAYS = "trace.json", "arrays.safetensors"
LIMIT = 50_000_000  # bytes of JSON: names, moments and noise of every tensor and call
AGAIN = "record it again: lockstep record FILE -o TRACE"

# What JSON must hold, by the types of its values.
FIELDS: dict[str, type] = {
    "program": str, "framework": str, "versions": dict, "device": str, "precision": str,
    "narrow": list, "widened": bool, "modules": dict, "kinds": dict, "settings": dict,
    "parameters": list, "tied": list, "loss": float, "events": list, "repeats": bool,
    "initial": dict, "batch": dict, "lacks": dict, "seed": int,
}  # fmt: skip


@dataclass(frozen=True)
class Trace:
    about: dict[str, Any]
    arrays: Arrays

    def group(self, prefix: str) -> Arrays:
        return group(self.arrays, prefix)

    @property
    def weights(self) -> Arrays:
        """What the recorded run started from."""
        return self.group("weights/0")


def read(folder: Path) -> Trace:
    """Raises UserError for whatever is no trace, or one cut short."""
    try:
        about = read_json(folder / ABOUT, limit=LIMIT)
        problem = _problem(about)
        if problem:
            raise Refused(problem)
        arrays = tensors.read(folder / ARRAYS, about["sha256"])
        problem = _missing(about, arrays)
        if problem:
            raise Refused(problem)
    except tensors.Damaged:
        raise UserError(f"{folder / ARRAYS}: damaged or cut short; {AGAIN}") from None
    except Refused as error:
        raise UserError(f"{folder}: {error}; {AGAIN}") from None
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror or error}; {AGAIN}") from None
    return Trace(about, arrays)


def _problem(about: dict[str, Any]) -> str:
    if about.get("format") != FORMAT:
        return f"format {about.get('format')!r} is not {FORMAT}"
    for name, kind in {**FIELDS, "sha256": str}.items():
        if type(about.get(name)) is not kind:
            return f"{name} is no {kind.__name__}"
    nests = ("events", "parameters", "narrow")
    for name in nests:
        if not all(type(each) is str for each in about[name]):
            return f"{name} holds more than names"
    for name in ("modules", "kinds"):
        if not all(type(each) is str for each in about[name].values()):
            return f"{name} holds more than names"
    for tied in about["tied"]:
        if type(tied) is not list or not all(type(each) is str for each in tied):
            return "tied holds more than names"
    for name, moments in about["initial"].items():
        numbers = ("mean", "std", "kurtosis")
        if type(moments) is not dict or any(type(moments.get(n)) is not float for n in numbers):
            return f"initial {name} has no moments"
    for name in ("losses", "envelope"):
        if not all(type(x) is float for x in about.get(name, [])):
            return f"{name} holds more than numbers"
    if len(about.get("losses", [])) != len(about.get("envelope", [])):
        return "losses and envelope differ in length"
    return ""


def _missing(about: dict[str, Any], arrays: Arrays) -> str:
    weights = group(arrays, "weights/0")
    for name in about["parameters"]:
        if name not in weights or f"grad/{name}" not in arrays:
            return f"no weights or gradient of {name}"
    if not all(np.isfinite(x).all() for x in weights.values()):
        return "weights that are not finite"
    return "" if group(arrays, "batch/0") else "no batch"
