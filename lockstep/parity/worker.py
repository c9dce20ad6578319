"""The service of a framework's twin in a worker process (`lockstep.worker`).

A variant is a planted bug or a harmless rewrite; it holds for the life of the process, so that no
program traced before it is taken for one that has it.
"""

import importlib
import importlib.util
import re
import time
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.config import Config
from lockstep.data.batch import Batch
from lockstep.judge.compare import stack
from lockstep.parity import wire
from lockstep.process import ROOT
from lockstep.twin import VARIANTS, StepResult, Twin
from lockstep_recorder.wire import Arrays, Message

PLAIN = ("evaluate", "logits", "step_bytes", "step_flops")  # methods of the twin itself
IMPORTED = re.compile(r"^(?:import|from) (\w[\w.]*)", re.M)
KEPT = 10  # built twins: compiling one takes seconds, and a case has a dozen configs


class Server:
    def __init__(self, module: str) -> None:
        build: Callable[[Config], Twin] = importlib.import_module(module).build
        self.twin = lru_cache(KEPT)(build)

    def answer(self, header: dict[str, Any], arrays: Arrays) -> Message:
        twin = self.twin(Config.from_json(header["config"]))
        twin.load(wire.unpack(header["state"], arrays))
        question, given = header["ask"], wire.unpack_input(arrays)
        if question in PLAIN:
            made = {question: getattr(twin, question)(given)}
            return ({}, made) if isinstance(made[question], np.ndarray) else (made, {})
        return getattr(self, question)(twin, given)

    def state(self, twin: Twin, given: np.ndarray) -> Message:
        """Sends the state as the twin returns it."""
        counters, arrays = wire.pack(twin.state())
        return {"state": counters}, arrays

    def traces(self, twin: Twin, given: Batch) -> Message:
        traced = [twin.trace(batch) for batch in given.split()]
        arrays = {
            f"{field}/{name}": x
            for field in ("activations", "activation_grads", "grads")
            for name, x in stack([getattr(trace, field) for trace in traced]).items()
        }
        return {"loss": [trace.loss for trace in traced]}, arrays

    def gradients(self, twin: Twin, given: Batch) -> Message:
        losses, grads = zip(*(twin.loss_and_grads(batch) for batch in given.split()))
        return {"loss": losses}, stack(list(grads))

    def first_moments(self, twin: Twin, given: Batch) -> Message:
        """Takes a step on each window from the state loaded; sends the first moments and amaxes."""
        start, moments = twin.state(), []
        for window in given.split():
            twin.load(start)
            twin.step(twin.place(window))()
            end = twin.state()
            moments.append(end.mu | amaxes_by_role(end.amaxes))
        return {}, stack(moments)

    def evaluations(self, twin: Twin, given: Batch) -> Message:
        """Evaluates (K, M, B, T) batches; sends (K,)."""
        return {}, {"evaluation": np.array([twin.evaluate(each) for each in given.split()])}

    def later_evaluations(self, twin: Twin, given: Batch) -> Message:
        """Evaluates each of (K, M, B, T) batches after an evaluation and a step on it, (K,)."""
        start, losses = twin.state(), []
        for batches in given.split():
            twin.load(start)
            twin.evaluate(batches)
            twin.step(twin.place(batches))()
            losses.append(twin.evaluate(batches))
        return {}, {"evaluation after a step": np.array(losses)}

    def next_logits(self, twin: Twin, given: np.ndarray) -> Message:
        """Computes logits (V, K) after prefixes of rows (K, T): one token, half, and all."""
        lengths = {"one token": 1, "half the context": len(given[0]) // 2,
                   "the whole context": len(given[0])}  # fmt: skip
        found = {
            f"logits after {name}": np.stack([twin.logits(row[:length]) for row in given], -1)
            for name, length in lengths.items()
        }
        return {}, found

    def seconds(self, twin: Twin, given: Batch) -> Message:
        """Times one optimizer step on each window but the first, which may have to compile."""
        seconds = []
        for window in given.split():
            began = time.perf_counter()
            twin.step(twin.place(window))()
            seconds.append(time.perf_counter() - began)
        return {"seconds": seconds[1:]}, {}

    def steps(self, twin: Twin, given: Batch) -> Message:
        given = blank_others(given, twin)
        results = [twin.step(twin.place(window))() for window in given.split()]
        counters, arrays = wire.pack(twin.state())
        numbers = [f for f in StepResult._fields if f != "norms"]
        curves = {f: [getattr(result, f) for result in results] for f in numbers}
        return {"state": counters, "curves": curves, "about": twin.describe()}, arrays


def blank_others(windows: Batch, twin: Twin) -> Batch:
    """Zeros the rows of windows that the loop does not read."""
    count = windows.tokens.shape[-2]
    own = twin.local_rows(count) if hasattr(twin, "local_rows") else None
    if own is None:
        return windows
    others = np.setdiff1d(np.arange(count), own)

    def blank(rows: np.ndarray) -> np.ndarray:
        rows = rows.copy()
        rows[..., others, :] = 0
        return rows

    return windows.map_arrays(blank)


def amaxes_by_role(amaxes: Arrays) -> Arrays:
    """Joins the amax histories of all layers; each number has one element's rounding."""
    if not amaxes:
        return {}
    history = np.stack(list(amaxes.values()))
    roles = ("x", "weight", "dy")
    return {f"amaxes of {role}": history[:, place] for place, role in enumerate(roles)}


def plants(module: str) -> dict[str, Callable[..., None]]:
    """Returns the module's mutants and semantics-preserving variants."""
    package = module.rpartition(".")[0]
    room = VARIANTS.get(package, f"{package}.")
    bugs = importlib.import_module(f"{room}bugs").BUGS
    try:
        return {**importlib.import_module(f"{room}rewrites").REWRITES, **bugs}
    except ModuleNotFoundError:
        return bugs


def plant(module: str, variant: str) -> None:
    """Plants the variant NAME or NAME=SIZE; none if that is empty."""
    if variant:
        name, _, size = variant.partition("=")
        plants(module)[name](*([float(size)] if size else []))


def preload(module: str) -> None:
    """Imports a twin of ours with its rewrites; of another twin what its file imports of others.

    That file itself is imported by a worker, for a mutant may change what it imports.
    """
    with suppress(ModuleNotFoundError):
        plants(module)
        if module.rpartition(".")[0] in VARIANTS:
            importlib.import_module(module)
            return
    spec = importlib.util.find_spec(module)
    text = Path(spec.origin).read_text(encoding="utf-8") if spec and spec.origin else ""
    for name in IMPORTED.findall(text):
        if not (ROOT / name.partition(".")[0]).is_dir():
            with suppress(ModuleNotFoundError):
                importlib.import_module(name)


def start(module: str, variant: str) -> Callable[[dict[str, Any], Arrays], Message]:
    """Plants the variant, and returns the functions that answer questions."""
    plant(module, variant)
    return Server(module).answer
