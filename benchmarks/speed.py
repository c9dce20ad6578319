"""Races that show what our own code costs, against examples/minimal, which does the same by hand.

Two processes take turns: A B, B A, A B ... Each turn is an optimizer step. The ratio of a pair
is free of the machine's drift, and of many pairs there is an interval. Both start anew at times.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks import minimal, tables
from benchmarks.cells import CONTENDERS, SMALL, Cell, Flags
from benchmarks.measure import take
from lockstep.model.state import initial_state
from lockstep.parity.pair import GPT
from lockstep.train.autotune import interval
from lockstep.train.memory import keep_freed_memory
from lockstep.worker import Worker, start_service
from lockstep_recorder.wire import Arrays, Message

# Of the peer's speed, by the lower end of the interval: where we are level, and where we lead.
LEVEL, AHEAD, FAR_AHEAD = 0.97, 1.05, 1.15
NO_SLOWER = 0.98  # with the ways that were measured than with the framework's own
FP32, BF16 = ("fp32", "fp32"), ("bf16", "bf16")
WARMUP = 3  # turns before the first that counts
PAIRS, RESTARTS = 60, 5  # of turns in a race, and of processes


@dataclass(frozen=True, kw_only=True)
class Race:
    """Two contenders, each with a policy: how fast `ours` is, with `theirs` as 1."""

    ours: str
    theirs: str
    policies: tuple[str, str] = FP32
    floor: float | None = LEVEL  # None: reported, not bounded

    @property
    def name(self) -> str:
        return " against ".join(
            f"{who} in {policy}" for who, policy in zip((self.ours, self.theirs), self.policies)
        )


RACES = [
    Race(ours="torch", theirs="nanogpt", floor=AHEAD),
    Race(ours="torch", theirs="nanogpt", policies=BF16, floor=AHEAD),
    Race(ours="torch-compiled", theirs="nanogpt-compiled", floor=AHEAD),
    Race(ours="torch-compiled", theirs="nanogpt-compiled", policies=BF16, floor=AHEAD),
    Race(ours="jax", theirs="bare-jax", floor=FAR_AHEAD),
    Race(ours="jax", theirs="bare-jax", policies=BF16, floor=FAR_AHEAD),
    Race(ours="jax", theirs="bare-jax-keeping"),
    Race(ours="jax", theirs="bare-jax-keeping", policies=BF16),
    Race(ours="jax", theirs="nanogpt", floor=FAR_AHEAD),
    *(
        Race(ours=ours, theirs=f"{ours}-own", policies=policies, floor=NO_SLOWER)
        for ours in ("torch", "jax")
        for policies in (FP32, BF16)
    ),
    Race(ours="jax", theirs="torch", floor=None),
    Race(ours="jax", theirs="jax", policies=("bf16", "fp32"), floor=None),
    Race(ours="torch", theirs="torch", policies=("bf16", "fp32"), floor=None),
]


# The trainers of examples/minimal: the framework, their flags, and whether they keep freed memory,
# which a twin of ours decides for itself.
MINIMAL: dict[str, tuple[str, Flags, bool]] = {
    "nanogpt": ("torch", {}, False),
    "nanogpt-compiled": ("torch", {"compile": True}, False),
    "bare-jax": ("jax", {}, False),
    "bare-jax-keeping": ("jax", {}, True),
}


class Racer(Worker):
    """A contender in a process of its own, which answers with the seconds of a turn."""

    def __init__(self, contender: str, policy: str) -> None:
        flags = {**SMALL, "batch_size": 4, "policy": policy, "steps": 10_000}
        words = [contender, json.dumps(flags)]
        connect = partial(start_service, "benchmarks.speed", *words)
        super().__init__(f"{contender} in {policy}", connect)
        self.turn()  # that it is ready

    def turn(self) -> float:
        return self.ask("turn")[0]["seconds"]


def start(contender: str, flags: str) -> Callable[[dict[str, Any], Arrays], Message]:
    """The racer's side (`lockstep.worker`)."""
    take_turn = build(contender, json.loads(flags))
    for _ in range(WARMUP):
        take_turn()

    def answer(header: dict[str, Any], arrays: Arrays) -> Message:
        began = time.perf_counter()
        take_turn()
        return {"seconds": time.perf_counter() - began}, {}

    return answer


def build(contender: str, flags: Flags) -> Callable[[], object]:
    """Makes a contender's turn, in this process, which is its own."""
    if contender in MINIMAL:
        framework, own, keeps = MINIMAL[contender]
        config = Cell(table="speed", contender=framework, flags=flags | own).config
        if keeps:
            import jax

            # The main thread then takes a step's buffers, as in a twin of ours.
            jax.config.update("jax_cpu_enable_async_dispatch", False)
        keep_freed_memory(keeps)
        trainer = minimal.TRAINERS[framework](config)
        trainer.load(initial_state(config))
        return partial(trainer.step, GPT.window(config, 0))
    config = Cell(table="speed", contender=contender, flags=flags).config
    twin = CONTENDERS[contender].build(config)
    twin.load(initial_state(config))
    twin.prepare()
    return partial(take, twin, [GPT.window(config, 0)])


def measure(pairs: int = PAIRS, restarts: int = RESTARTS, **fields: Any) -> dict[str, Any]:
    """Times pairs of turns in several pairs of processes, for where one's memory lies is luck."""
    race = Race(**fields)
    turns = [turn for _ in range(restarts) for turn in heat(race, pairs // restarts)]
    return {"seconds": turns, **interval(turns), "base": SMALL}


def heat(race: Race, pairs: int) -> list[tuple[float, float]]:
    """The two take turns, and which of them begins changes with each pair."""
    racers = [Racer(who, how) for who, how in zip((race.ours, race.theirs), race.policies)]
    turns = []
    try:
        for pair in range(pairs):
            order = (0, 1) if pair % 2 == 0 else (1, 0)
            seconds = {index: racers[index].turn() for index in order}
            turns.append((seconds[0], seconds[1]))
    finally:
        for racer in racers:
            racer.close()
    return turns


def holds(result: dict[str, Any]) -> bool:
    return result["floor"] is None or result["low"] >= result["floor"]


def side_by_side(columns: dict[str, dict[str, dict[str, Any]]]) -> str:
    """The races in rows, and each machine's speeds in a column.

    Args:
        columns: by machine, its rows by name.
    """
    names = dict.fromkeys(name for rows in columns.values() for name in rows)
    lines = []
    for name in names:
        found = [rows.get(name) for rows in columns.values()]
        floor = next(row["floor"] for row in found if row)
        bound = "" if floor is None else f"{floor:g}"
        lines.append([name.removeprefix("race "), *map(_describe, found), bound])
    return tables.markdown(["race: speed, theirs = 1", *columns, "floor"], lines)


def _describe(result: dict[str, Any] | None) -> str:
    if result is None:
        return ""
    said = f"{result['speed']:.3f} ({result['low']:.3f} to {result['high']:.3f})"
    return said if holds(result) else f"{said}, **falls short**"
