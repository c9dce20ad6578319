"""`--fp32-islands auto`: the islands that remove most of the gradient's error for their time.

Measured is what `lockstep sensitivity` measures: the error with each module as the only island, and
the time of a step with all of a kind. From there on figures are added up: squared errors, for
roundings are independent, and times. Which set is best is a knapsack. The set is then measured,
and so is every kind alone; the better one is taken.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.config import Config, islands
from lockstep.errors import UserError
from lockstep.model.stacked import scans_layers
from lockstep.parity import sensitivity
from lockstep.parity.case import TRAINED_STEPS, Case
from lockstep.parity.pair import GPT
from lockstep.parity.side import Side

PARTS = 1000  # of a budget, or of the squared error to remove: the knapsack is exact up to one
TRIES = 3  # with a smaller budget, or a smaller error, where sums of figures said too much


@dataclass(frozen=True, kw_only=True)
class Goal:
    """One of the two."""

    budget: float = 0.0  # of a step's time, as a share
    error: float = 0.0  # of the gradient, relative to its norm


@dataclass(frozen=True, kw_only=True)
class Item:
    """Modules that are chosen together."""

    pattern: str
    removed: float  # squared error
    time: float  # share of a step; below 0 where the island is faster


@dataclass(frozen=True, kw_only=True)
class Islands:
    """Some, with what was measured of them."""

    patterns: str
    error: float
    time: float  # share of a step, beside that without islands


def fill(items: Sequence[Item], budget: float) -> list[Item]:
    """Those that together remove most within a budget of time."""
    best: list[tuple[float, list[Item]]] = [(0.0, [])] * (PARTS + 1)  # by what may be spent
    for item in (each for each in items if each.removed > 0):
        cost = max(0, math.ceil(item.time / budget * PARTS))
        for room in range(PARTS, cost - 1, -1):
            removed, chosen = best[room - cost]
            if removed + item.removed > best[room][0]:
                best[room] = (removed + item.removed, [*chosen, item])
    return best[PARTS][1]


def reach(items: Sequence[Item], removed: float) -> list[Item]:
    """The cheapest that together remove so much; all that remove anything where none do."""
    useful = [each for each in items if each.removed > 0]
    least: list[tuple[float, list[Item]]] = [(0.0, [])] + [(math.inf, useful)] * PARTS
    for item in useful:
        parts = math.floor(item.removed / removed * PARTS)
        for done in range(PARTS, 0, -1):
            cost, chosen = least[max(0, done - parts)]
            if cost + max(0.0, item.time) < least[done][0]:
                least[done] = (cost + max(0.0, item.time), [*chosen, item])
    return least[PARTS][1]


@dataclass(frozen=True, kw_only=True)
class Meter:
    """What is known of a config's islands, and what measures more."""

    whole: float  # error without any
    least: float  # with all
    items: list[Item]
    kinds: list[Islands]  # each alone
    measure: Callable[[str], Islands]

    def choose(self, goal: Goal) -> Islands:
        """
        Raises:
            UserError: nothing reaches the error.
        """
        if goal.error:
            return self.cheapest(goal.error)
        found, allowed = self.measure(""), goal.budget
        for _ in range(TRIES):
            tried = self.measure(_patterns(fill(self.items, allowed)))
            if tried.time <= goal.budget:
                found = tried
                break
            allowed *= goal.budget / tried.time
        alone = [each for each in self.kinds if each.time <= goal.budget]
        return min([found, *alone], key=lambda each: each.error)

    def cheapest(self, error: float) -> Islands:
        aim = error
        for _ in range(TRIES):
            if self.whole <= error:
                return self.measure("")
            tried = self.measure(_patterns(reach(self.items, self.whole**2 - aim**2)))
            if tried.error <= error:
                alone = [each for each in self.kinds if each.error <= error]
                return min([tried, *alone], key=lambda each: each.time)
            aim *= error / tried.error
        remedy = f"is not reached; with all modules in float32 it is {self.least:.1e}"
        raise UserError(f"--error {error:g}: {remedy}")


def _patterns(items: Sequence[Item]) -> str:
    return ",".join(item.pattern for item in items)


def meter(side: Side, case: Case, config: Config) -> Meter:
    """`case` has the config of the errors, strict numerics; `config` is the one that is timed."""
    error = sensitivity.error_of(side, case)
    kinds = islands.by_kind(config.model.matmuls)
    together = kinds if scans_layers(config) else {n: [n] for n in config.model.matmuls}
    whole = error([])["gradient"]
    errors = {kind: error(group)["gradient"] for kind, group in kinds.items()}
    for pattern, group in together.items():
        print(f"{side.framework}: {pattern}", file=sys.stderr)
        errors.setdefault(pattern, error(group)["gradient"])
    times = sensitivity.times(side, case, config, list(kinds))

    def item(pattern: str) -> Item:
        kind = islands.kind(pattern)
        share = 1 if pattern == kind else len(kinds[kind])
        removed = whole**2 - errors[pattern] ** 2
        return Item(pattern=pattern, removed=removed, time=(times[kind] - 1) / share)

    def measure(patterns: str) -> Islands:
        if not patterns:
            return Islands(patterns="", error=whole, time=0.0)
        chosen = [name for name in config.model.matmuls if islands.match(patterns, name)]
        time = sensitivity.times(side, case, config, [patterns])[patterns] - 1
        return Islands(patterns=patterns, error=error(chosen)["gradient"], time=time)

    return Meter(
        whole=whole, least=error(config.model.matmuls)["gradient"],
        items=list(map(item, together)), measure=measure,
        kinds=[Islands(patterns=k, error=errors[k], time=times[k] - 1) for k in kinds],
    )  # fmt: skip


def choose(framework: str, config: Config, goal: Goal, say: Callable[[str], Any] = print) -> str:
    """The patterns of a config's islands, measured in one framework, in a process of its own."""
    side = Side(framework, GPT.modules[framework], remember=False)
    long = config.replace(steps=max(config.optim.steps, 2 * TRAINED_STEPS))
    try:
        meters = meter(side, sensitivity.strict_case(side, side, long), long)
        found = meters.choose(goal)
    finally:
        side.close()
    chosen = shorten(found.patterns, config.model.matmuls)
    say(f"--fp32-islands {chosen or 'none'}: error of the gradient {meters.whole:.2e} -> "
        f"{found.error:.2e}, {found.time:+.1%} of a step's time")  # fmt: skip
    return chosen


def shorten(patterns: str, modules: Sequence[str]) -> str:
    """The same modules, by a kind's pattern where all of its kind are chosen."""
    chosen = [name for name in modules if patterns and islands.match(patterns, name)]
    left = {islands.kind(name) for name in modules if name not in chosen}
    return ",".join(dict.fromkeys(
        name if islands.kind(name) in left else islands.kind(name) for name in chosen
    ))  # fmt: skip
