"""A recorded reference: a folder with JSON and arrays, read as untrusted input."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.check import names
from lockstep.check.following import tapes
from lockstep.errors import UserError, why
from lockstep.files.stream import checksum, map_all
from lockstep.files.untrusted import Refused, read_json
from lockstep.model.params import Arrays
from lockstep_recorder.main import SERIES
from lockstep_recorder.noise import ULPS
from lockstep_recorder.recording import NOISE_OF_LOSS, SHARE
from lockstep_recorder.wire import group

FORMAT = 3
ABOUT, ARRAYS = "trace.json", "arrays.safetensors"
LIMIT = 50_000_000  # bytes of JSON: names, moments and noise of every tensor and call
AGAIN = "record it again: lockstep record FILE -o TRACE"

# Of a batch's arrays, which the file holds as floats.
DTYPES = {"float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8",
          "uint16", "uint32", "uint64", "bool", "complex64", "complex128"}  # fmt: skip
# What JSON must hold, by the types of its values.
FIELDS: dict[str, type] = {
    "program": str, "framework": str, "versions": dict, "device": str, "precision": str,
    "narrow": list, "widened": bool, "modules": dict, "kinds": dict,
    "parameters": list, "tied": list, "loss": float, "events": list, "repeats": bool,
    "initial": dict, "batch": dict, "lacks": dict, "seed": int, "rounded": list,
    "accumulated": list, "paths": dict, "again": float, "constants": float, "forward": bool,
    "differentiates": bool, "refused": str, "hooked": list, "unseen": list, "tape": dict,
    "written": dict, "same": dict,
}  # fmt: skip


@dataclass(frozen=True)
class Trace:
    about: dict[str, Any]
    arrays: Arrays
    _groups: dict[str, Arrays] = field(default_factory=dict, init=False, repr=False)

    def group(self, prefix: str) -> Arrays:
        """Returns the arrays named PREFIX/NAME, by NAME: a dict of the caller's own."""
        if prefix not in self._groups:
            self._groups[prefix] = group(self.arrays, prefix)
        return {**self._groups[prefix]}

    def with_steps(self, told: dict[str, Any], found: Arrays) -> "Trace":
        """Returns the trace with another recording of its optimizer and its loss curve.

        Args:
            told, found: see `recording.mended_steps`.
        """
        about = {**self.about, **told, **{n: found[n].tolist() for n in ("losses", "envelope")}}
        return Trace(about, {**self.arrays, **found})

    @property
    def weights(self) -> Arrays:
        """Weights that the recorded run started from, in the order of the model."""
        found = self.group("weights/0")
        return {name: found[name] for name in self.about["initial"]}


def read(folder: Path) -> Trace:
    """Raises UserError for whatever is no trace, or one cut short."""
    try:
        about = read_json(folder / ABOUT, limit=LIMIT)
        about |= {n: _with_nan(about[n]) for n in SERIES if type(about.get(n)) is list}
        problem = _problem(about)
        if problem:
            raise Refused(problem)
        if checksum(folder / ARRAYS) != about["sha256"]:
            raise UserError(f"{folder / ARRAYS}: damaged or cut short; {AGAIN}")
        arrays = map_all(folder / ARRAYS)
        same = about["same"]
        if not set(same.values()) <= arrays.keys():
            raise Refused("same names no array")
        arrays |= {name: arrays[first] for name, first in same.items()}
        problem = _missing(about, arrays)
        if problem:
            raise Refused(problem)
    except FileNotFoundError as error:
        raise UserError(f"{folder}: is no trace, for it has no {Path(error.filename).name}; "
                        f"{AGAIN}") from None  # fmt: skip
    except (OSError, Refused) as error:
        raise UserError(f"{folder}: {why(error)}; {AGAIN}") from None
    return Trace(about, arrays)


def _with_nan(numbers: list[Any]) -> list[Any]:
    """Puts NaN where JSON has null, for it has no number that is not finite."""
    return [math.nan if x is None else x for x in numbers]


def _problem(about: dict[str, Any]) -> str:
    if about.get("format") != FORMAT:
        return f"format {about.get('format')!r} is not {FORMAT}"
    for name, kind in {**FIELDS, "sha256": str}.items():
        if type(about.get(name)) is not kind:
            return f"{name} is no {kind.__name__}"
    for name in ("events", "parameters", "narrow", "rounded", "hooked", "unseen"):
        if not all(type(each) is str for each in about[name]):
            return f"{name} holds more than names"
    if not _do_nest(about["events"]):
        return "events do not nest"
    for name in ("modules", "kinds"):
        if not all(type(each) is str for each in about[name].values()):
            return f"{name} holds more than names"
    if not {event[1:] for event in about["events"]} <= set(about["kinds"]):
        return "events of calls without a kind"
    for tied in about["tied"]:
        if type(tied) is not list or not tied or not all(type(each) is str for each in tied):
            return "tied holds more than names"
    if about["precision"] not in ("float64", "float32"):
        return f"precision {about['precision']} is unknown"
    for name, moments in about["initial"].items():
        kinds = {"mean": float, "std": float, "kurtosis": float}
        if type(moments) is not dict or any(
            type(moments.get(n)) is not k for n, k in kinds.items()
        ):
            return f"initial {name} has no moments"
    if not all(type(why) is str for why in about["lacks"].values()):
        return "lacks holds more than reasons"
    if not all(type(first) is str for first in about["same"].values()):
        return "same holds more than names"
    listed: dict[str, type] = {"losses": list, "envelope": list, "accumulated": list, "noise": dict}
    for name, kind in listed.items():
        if type(about.get(name, kind())) is not kind:
            return f"{name} is no {kind.__name__}"
        numbers: Any = about.get(name, kind())
        if not all(type(x) is float for x in (numbers.values() if kind is dict else numbers)):
            return f"{name} holds more than numbers"
    mended = about.get("mended", {"ended": ""})
    if type(mended) is not dict or type(mended.get("ended")) is not str:
        return "mended says nothing of its end"
    if type(about.get("ended", "")) is not str:
        return "ended is no reason"
    for name in ("kept", "sets", "wraps"):
        held = about.get(name, [])
        if type(held) is not list or not all(type(each) is str for each in held):
            return f"{name} holds more than names"
    if type(about.get("mapping", {})) is not dict:
        return "mapping is no dict"
    if not all(type(path) is str for path in about["paths"].values()):
        return "paths holds more than paths"
    if not _are_conditions(about.get("conditions", [])):
        return "conditions holds more than lines and numbers"
    if not _is_written(about["written"]):
        return "written holds more than formats, lines and names"
    if len(about.get("losses", [])) != len(about.get("envelope", [])):
        return "losses and envelope differ in length"
    return ""


def _are_conditions(told: Any) -> bool:
    """Says if this is what `Conditions.one_sided` tells."""
    return type(told) is list and all(
        type(each) is dict
        and type(each.get("line")) is str
        and type(each.get("outcome")) is bool
        and type(each.get("numbers")) is list
        and all(type(x) is float for x in each["numbers"])
        for each in told
    )


def _is_written(told: Any) -> bool:
    """Says if this is what `lockstep_recorder.written` describes."""
    try:
        pairs = [
            ("", told["products"]),
            *((line, kind) for kind, line in told["delicate"].values()),
        ]
        lines = [*told["drops"], *told["drops_always"], *(line for line, _ in pairs)]
        return all(kind in ULPS for _, kind in pairs) and all(type(x) is str for x in lines)
    except (TypeError, KeyError, ValueError, AttributeError):
        return False


def _do_nest(events: list[str]) -> bool:
    """Says if each call begins once, and ends inside the one in which it began."""
    opened: list[str] = []
    begun: set[str] = set()
    for event in events:
        sign, call = event[:1], event[1:]
        if sign == "+" and call not in begun:
            opened.append(call)
            begun.add(call)
        elif not (sign == "-" and opened and opened.pop() == call):
            return False
    return not opened


def _leaves(spec: Any, depth: int = 0) -> list[Any] | None:
    """Lists the arrays that a batch's description names; None where it describes nothing."""
    if type(spec) is not dict or not spec or depth > 20:
        return None
    kind, inner = next(iter(spec.items()))
    if kind == "array" and type(inner) is str and type(spec.get("dtype")) is str:
        return [inner] if spec["dtype"] in DTYPES else None
    if kind == "value":
        return []
    parts = inner.values() if kind == "dict" and type(inner) is dict else inner
    if kind not in ("dict", "list", "tuple") or not isinstance(parts, Iterable):
        return None
    found = [_leaves(part, depth + 1) for part in parts]
    return None if None in found else [leaf for leaves in found for leaf in leaves or []]


def _missing_of_mended(about: dict[str, Any], arrays: Arrays) -> str:
    """Says why the recording with a mended clip is not one of the same steps, or ""."""
    mended = group(arrays, "mended")
    expected = {name: x.shape for name, x in arrays.items()
                if name.startswith("fed/") and "/weights/" in name}  # fmt: skip
    expected |= dict.fromkeys(("losses", "envelope"), (len(about.get("losses", [])),))
    wrong = [name for name, shape in expected.items()
             if name not in mended or mended[name].shape != shape]  # fmt: skip
    return f"no mended/{wrong[0]}" if wrong else ""


def _missing(about: dict[str, Any], arrays: Arrays) -> str:
    """Says why the arrays are not those that the JSON speaks of, or ""."""
    weights = group(arrays, "weights/0")
    if set(weights) != set(about["initial"]):
        return "initial values of other tensors than the weights"
    if not {each[0] for each in about["tied"]} <= set(weights):
        return "tied names no weight"
    if not all(map(names.segments, {*weights, *chain(*about["tied"])})):
        return "a weight without a name"
    known = set(about["parameters"])  # others may be a mask of infinite values
    if any(np.isnan(x).any() or (name in known and np.isinf(x).any())
           for name, x in weights.items()):  # fmt: skip
        return "weights that are not finite"
    whole = [] if about["forward"] else about["parameters"]
    steps = [("grad", whole), ("sum", whole)]
    steps += [("spread", whole)] * (about["precision"] == "float64")
    labels = {name.split("/")[1] for name in arrays if name.startswith("fed/")}
    for label in labels:
        fed = {name.split("/")[0] for name in group(arrays, f"fed/{label}")}
        for step in range(len(fed)):
            steps.append((f"fed/{label}/{step}/weights", list(weights)))
            if step < len(fed) - 1:
                steps.append((f"fed/{label}/{step}/grad", about["parameters"]))
    for prefix, expected in steps:
        for name in expected:
            if name not in weights or f"{prefix}/{name}" not in arrays:
                return f"no {prefix}/{name}"
            if arrays[f"{prefix}/{name}"].shape != weights[name].shape:
                return f"{prefix}/{name} has another shape than the weight"
    shapes = {name: x.shape for name, x in weights.items()}
    batches = len(about["accumulated"])
    if any(arrays[name].shape != (batches,) for name in (SHARE, NOISE_OF_LOSS) if name in arrays):
        return "shares or noises of other batches"
    slots = [x.shape for x in group(arrays, "slot").values()]
    if any(len(shape) != 2 or shape[0] != slots[0][0] or shape[1] not in (1, 3) for shape in slots):
        return "slots of an optimizer that are no rows of figures"
    if any(x.ndim != 1 for x in group(arrays, "asked").values()):
        return "asked is no row of steps"
    problem = tapes.problem_of(about["tape"], arrays, shapes)
    if problem:
        return problem
    problem = _missing_of_mended(about, arrays) if "mended" in about else ""
    if problem:
        return problem
    named = _leaves(about["batch"])
    for step in range(max(len(about.get("losses", [])), len(about["accumulated"]), 1)):
        if named is None or set(named) != set(group(arrays, f"batch/{step}")):
            return f"the batch of step {step} is not as described"
    return ""
