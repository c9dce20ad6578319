"""How long an experiment will take: `python -m benchmarks.experiments.expected ARMS`, as JSON.

One step of each arm is timed, all arms of a framework in one process.
"""

import json
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import NamedTuple

from benchmarks import process
from benchmarks.experiments.arm import FRAMEWORKS, Arm
from benchmarks.process import ROOT, build, words
from lockstep.config import Config
from lockstep.errors import require
from lockstep.exits import exit_status
from lockstep.parity.pair import GPT
from lockstep.parity.toy import start
from lockstep.process import run_module

# What changes the numbers of a step and not the time that it takes; or, remat, not by much.
FREE = ("lr", "min_lr", "warmup", "loss_scale_init", "loss_scale_interval", "remat")
IMPORTS = 4.0  # seconds, on two cores: a process of JAX, or of torch, before it does anything
PASSES = 2  # besides its steps, an arm is evaluated, and asked for its account of a step


class Cost(NamedTuple):
    """Seconds."""

    start: float  # to build, compile and take the first step
    step: float


def seconds(arms: list[Arm], environment: dict[str, str]) -> float | None:
    """Of all arms, one after the other; None where one of them cannot take a step."""
    total = IMPORTS * len(arms)
    for framework in FRAMEWORKS:
        trained = [arm for arm in arms if arm.framework == framework and arm.steps]
        if not trained:
            continue
        request = json.dumps([asdict(arm) for arm in trained])
        done = run_module(
            "benchmarks.experiments.expected", request,
            changes=environment, cwd=ROOT, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            return None
        timed = [Cost(*cost) for cost in json.loads(done.stdout.splitlines()[-1])]
        total += sum(
            PASSES * cost.start + arm.runs * arm.steps * cost.step
            for arm, cost in zip(trained, timed)
        )
    return total


def costs(arms: Iterable[Arm]) -> list[Cost]:
    """Of the arms of one framework; those that take the same time are timed once."""
    known: dict[Config, Cost] = {}
    found = []
    for arm in arms:
        flags = {name: value for name, value in arm.flags.items() if name not in FREE}
        config = replace(arm, steps=10, flags=flags).config
        if config not in known:
            known[config] = cost(arm.framework, config)
        found.append(known[config])
    return found


def cost(framework: str, config: Config) -> Cost:
    began = time.perf_counter()
    built = start(framework, config)
    built.prepare()
    window = built.place(GPT.window(config, 0))
    built.step(window)()
    started = time.perf_counter()
    built.step(window)()
    return Cost(started - began, time.perf_counter() - started)


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    (given,) = words(argv, "benchmarks.experiments.expected", "ARMS")
    fields = process.parse_word(given)
    require(type(fields) is list, "ARMS", repr(given[:40]), "no list; give one as JSON")
    arms = [build(Arm, each) for each in fields]
    print(json.dumps(costs(arms)))
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
