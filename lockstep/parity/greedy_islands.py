"""Choose `--fp32-islands` greedily, by measured sensitivity.

`lockstep sensitivity` measures the error of the gradient with some modules as islands, and the time
of a step with all modules of a kind. Modules are taken in the order of squared error removed for
time spent.
"""

import sys
from collections.abc import Sequence
from contextlib import closing

from lockstep.config import Config, islands
from lockstep.errors import UserError
from lockstep.parity import sensitivity
from lockstep.parity.case import TRAINED_STEPS
from lockstep.parity.pair import GPT
from lockstep.parity.side import Side
from lockstep.plan.layers import scans_layers

LEAST_TIME = 1e-4  # of a step; what an island costs that costs nothing


def choose(framework: str, config: Config, *, budget: float = 0.0, error: float = 0.0) -> str:
    """Measure in one framework, in a separate process, and return the islands' patterns.

    Args:
        budget: the most time that the islands may cost, as a share of a step; or 0.
        error: the error of the gradient, relative to its norm, that they are to reach; or 0.

    Raises:
        UserError: nothing reaches the error.
    """
    config = config.replace(steps=max(config.optim.steps, 2 * TRAINED_STEPS))
    with closing(Side(framework, GPT.modules[framework], remember=False)) as side:
        return _choose(side, config, budget, error)


def _choose(side: Side, config: Config, budget: float, error: float) -> str:
    case, names = sensitivity.strict_case(side, side, config), config.model.matmuls
    measure = sensitivity.error_of(side, case)
    kinds = islands.by_kind(names)
    groups = kinds if scans_layers(config) else {name: [name] for name in names}
    times = sensitivity.times(side, case, config, list(kinds))
    whole = measure([])["gradient"]
    removed, cost = {}, {}
    for pattern, group in groups.items():
        print(f"{side.framework}: {pattern}", file=sys.stderr)
        kind = islands.kind(pattern)
        removed[pattern] = whole**2 - measure(group)["gradient"] ** 2
        cost[pattern] = max(LEAST_TIME, (times[kind] - 1) * len(group) / len(kinds[kind]))
    useful = [pattern for pattern in groups if removed[pattern] > 0]
    ranked = sorted(useful, key=lambda pattern: -removed[pattern] / cost[pattern])

    def error_with(patterns: list[str]) -> float:
        wide = [name for pattern in patterns for name in groups[pattern]]
        return measure(wide)["gradient"] if wide else whole

    def time_with(patterns: list[str]) -> float:
        text = ",".join(patterns)
        return sensitivity.times(side, case, config, [text])[text] - 1 if text else 0.0

    chosen: list[str] = []
    if error:
        while error_with(chosen) > error:
            if len(chosen) == len(ranked):
                least = measure(names)["gradient"]
                remedy = f"is not reached; with all modules in float32 it is {least:.1e}"
                raise UserError(f"--error {error:g}: {remedy}")
            chosen.append(ranked[len(chosen)])
    else:
        for pattern in ranked:
            if sum(cost[each] for each in [*chosen, pattern]) <= budget:
                chosen.append(pattern)
        while time_with(chosen) > budget:  # together they may take longer than their sum
            chosen.pop()
    text = shorten([name for pattern in chosen for name in groups[pattern]], names)
    print(f"--fp32-islands {text or 'none'}: error of the gradient {whole:.2e} -> "
        f"{error_with(chosen):.2e}, {time_with(chosen):+.1%} of a step's time")  # fmt: skip
    return text


def shorten(chosen: Sequence[str], modules: Sequence[str]) -> str:
    """Name modules in order; if all of a kind are chosen, by the kind's pattern."""
    left = {islands.kind(name) for name in modules if name not in chosen}
    in_order = [name for name in modules if name in chosen]
    named = (name if islands.kind(name) in left else islands.kind(name) for name in in_order)
    return ",".join(dict.fromkeys(named))
