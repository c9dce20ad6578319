"""Chooses the fastest ways by measurement: `--autotune auto`.

A twin has several ways to compute the same: attention written out or by a kernel, one library or
another. On a CPU the operation that a way replaces runs forward and backward in each of them, in
turns: attention between its linear layers, and one linear layer. A way is taken where it is faster
than the framework's own for certain, and by more than `MARGIN`. The answer is kept in the user's
cache by CPU, versions, shape and policy, and stands in the run's config.json.

Where a way is faster by `MARGIN` in all but one of `ROUNDS` rounds, so is the low end of its 95 %
interval. So it is out as soon as it was not in two, and most races end after two rounds.
"""

import hashlib
import json
import mmap
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from math import comb
from pathlib import Path
from typing import Any

from lockstep import __version__, provenance, twin
from lockstep.config import Config, ExecutionConfig, OptimConfig, PrecisionConfig
from lockstep.config.autotune import AUTO, FLAG, NONE, parse
from lockstep.errors import UserError, require
from lockstep.files import durable
from lockstep.files.cache import cache_folder
from lockstep.train.memory import keep_freed_memory

MARGIN = 1.02  # of the framework's own speed
ROUNDS, LOST = 9, 2  # rounds at most; in so many a way was not faster, and is out
TOKENS = 2048  # of a micro-batch that is measured, at most
KEPT, BUFFER = "memory=kept", b"1" * 2**23  # what is written in pages that are kept, or new
# What libraries read, and choose their kernels and their threads by.
READ = ("ATEN_", "DNNL_", "MKL_", "NPROC", "OMP_", "ONEDNN_", "XLA_")

Turn = Callable[[], float]  # -> seconds
Enter = Callable[[str, Config, str], Turn]  # framework, config, name of the ways
Speeds = dict[str, dict[str, float]]  # by way; the framework's own is 1


def default() -> str:
    """Returns the default of --autotune."""
    return os.environ.get("LOCKSTEP_AUTOTUNE", AUTO)


def resolve(framework: str, config: Config, enter: Enter | None = None) -> Config:
    """Replaces `auto` by the ways that are faster here, so that the run can be repeated.

    Strict numerics and several devices take the framework's own ways.

    Args:
        enter: makes a turn of a contestant, for a race.

    Raises:
        UserError: a way was asked for that is not here.
    """
    asked = config.run.autotune
    if asked == AUTO and (config.precision.strict or config.mesh.size > 1):
        asked = NONE
    if asked == NONE:
        return config.replace(autotune=NONE)
    ways = twin.module(framework).ways(config)
    if asked == AUTO:
        speeds = measure(framework, shrink(config), ways, enter or enter_operation) if ways else {}
        return config.replace(autotune=choose(speeds))
    for name, way in parse(asked).items():
        each = f"{name}={way}"
        require(each in ways, FLAG, asked, f"{each} is not here; use {AUTO}, {', '.join(ways)}")
    return config


def shrink(config: Config) -> Config:
    """Leaves of a config what the speed of an operation depends on, and few rows."""
    model, rows = config.model.base, min(config.optim.batch_size, TOKENS // config.model.context)
    small: dict[str, Any] = {"model": "auto", "n_layer": 1, "dropout": 0.0, "padded_vocab": 0}
    precision = config.precision
    return Config(
        model=replace(model, **small, vocab=256),
        precision=PrecisionConfig(policy=precision.policy, attention=precision.attention),
        optim=OptimConfig(batch_size=max(1, rows), accum=1),
        execution=ExecutionConfig(remat="none"),
        run=replace(config.run, init=""),
    )


def measure(framework: str, config: Config, ways: list[str], enter: Enter) -> Speeds:
    """Recalls the speeds of the ways, or measures them and keeps them."""
    of = describe(framework, config, ways)
    try:
        folder = cache_folder() / "autotune"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{hashlib.sha256(_to_text(of).encode()).hexdigest()[:32]}.json"
    except OSError:  # a run needs none
        return race_all(framework, config, ways, enter)
    if (kept := read(path)) and kept["of"] == of:
        return kept["speeds"]
    speeds = race_all(framework, config, ways, enter)
    try:
        with durable.lock(folder):
            durable.replace(path, _to_text({"of": of, "speeds": speeds}))
    except OSError:
        pass
    return speeds


def describe(framework: str, config: Config, ways: list[str]) -> dict[str, Any]:
    """Describes the facts on which an answer depends."""
    return {
        "framework": framework, "policy": config.precision.policy, "model": asdict(config.model),
        "attention": config.precision.attention, "rows": config.optim.batch_size, "ways": ways,
        "machine": describe_machine(),
    }  # fmt: skip


def describe_machine() -> dict[str, Any]:
    """Describes the CPU, the usable part of it, and the versions."""
    used = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    limits = {name: value for name, value in sorted(os.environ.items()) if name.startswith(READ)}
    return {
        "cpu": provenance.cpu(), "cores": used, "limits": limits,
        "versions": {"lockstep": __version__, **provenance.versions()},
    }  # fmt: skip


def read(path: Path) -> dict[str, Any] | None:
    """Reads a cached answer; None if there is none, or it is foreign or damaged."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        for way, speed in kept["speeds"].items():
            parse(way)
            assert {*speed} == {"speed", "low", "high"}
            assert all(isinstance(value, float) for value in speed.values())
        return kept if isinstance(kept["of"], dict) else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, AssertionError, UserError):
        return None


def answers() -> list[dict[str, Any]]:
    """Lists all cached answers for this machine in its present state."""
    try:
        found = map(read, sorted((cache_folder() / "autotune").glob("*.json")))
        return [kept for kept in found if kept and kept["of"]["machine"] == describe_machine()]
    except (OSError, LookupError):
        return []


def _to_text(value: dict[str, Any]) -> str:
    return json.dumps(value, sort_keys=True)


def race_all(framework: str, config: Config, ways: list[str], enter: Enter) -> Speeds:
    """Races the ways of each name. Memory is the first: the others run in what is taken there.

    An operation's buffers are smaller than the model's, and glibc may keep them by itself.
    """
    speeds, rest = Speeds(), [way for way in ways if way != KEPT]
    if KEPT in ways:
        speeds = race({NONE: take_pages(kept=False), KEPT: take_pages(kept=True)})
        keep_freed_memory(choose(speeds) == KEPT)
    entered: dict[str, dict[str, Turn]] = {}
    for way in rest:
        name = way.partition("=")[0]
        turns = entered.setdefault(name, {})
        for each in (way,) if turns else (NONE, way):
            turns[each] = enter(framework, config.replace(autotune=each), name)
    for turns in entered.values():
        speeds |= race(turns)
    return speeds


def take_pages(*, kept: bool) -> Turn:
    """Makes a turn that writes a buffer: a kept one, or one that it takes from the system."""
    take = partial(mmap.mmap, -1, len(BUFFER), flags=mmap.MAP_PRIVATE)
    buffer = take()

    def turn() -> float:
        began = time.perf_counter()
        pages = buffer if kept else take()
        pages[:] = BUFFER
        del pages  # which gives new ones back
        return time.perf_counter() - began

    return turn


def enter_operation(framework: str, config: Config, name: str) -> Turn:
    """Makes a turn that runs the operation which ways of a name replace."""
    run = twin.module(framework).operation(config, name)

    def turn() -> float:
        began = time.perf_counter()
        run()
        return time.perf_counter() - began

    return turn


def race(turns: dict[str, Turn]) -> Speeds:
    """Lets all ways take turns, until each is chosen or dropped.

    Returns:
        The speeds of all but the first, that of the first being 1.
    """
    first, *others = turns
    for turn in turns.values():
        turn()  # the first one waits for a compiler, and fills caches
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in others}
    for number in range(ROUNDS):
        running = [name for name in others if count_lost(pairs[name]) < LOST]
        if not running:
            break
        order = [first, *running] if number % 2 == 0 else [*reversed(running), first]
        seconds = {name: turns[name]() for name in order}
        for name in running:
            pairs[name].append((seconds[name], seconds[first]))
    return {name: interval(found) for name, found in pairs.items()}


def count_lost(pairs: list[tuple[float, float]]) -> int:
    """Counts the pairs in which ours was not faster by `MARGIN`; see `interval`."""
    return sum(theirs <= MARGIN * ours for ours, theirs in pairs)


def choose(speeds: Speeds) -> str:
    """Chooses the fastest way of each name, if the low end of its speed is above `MARGIN`."""
    best: dict[str, str] = {}
    for way, found in sorted(speeds.items(), key=lambda item: item[1]["speed"]):
        if found["low"] > MARGIN:
            best[way.partition("=")[0]] = way
    return ",".join(sorted(best.values())) or NONE


def interval(turns: list[tuple[float, float]]) -> dict[str, float]:
    """Computes the ratio of speeds: the median of the pairs, and its 95 % interval.

    Order statistics, because a burst of other work in one turn says nothing of either contender.

    Args:
        turns: seconds, (ours, theirs).
    """
    speeds = sorted(float(theirs / ours) for ours, theirs in turns)
    edge = outside(len(speeds))
    return {"speed": statistics.median(speeds), "low": speeds[edge], "high": speeds[-1 - edge]}


def outside(n: int) -> int:
    """Counts the sorted values, of n, below an interval that misses the median on that side in at
    most 2.5 % of all cases.
    """
    below, chance = 0, 0.5**n
    while chance <= 0.025:
        below += 1
        chance += comb(n, below) * 0.5**n
    return max(0, below - 1)
