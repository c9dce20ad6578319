"""The flags of `--fp32-islands auto`, and the config that it becomes."""

import math
from typing import Any

from lockstep.config import Config
from lockstep.errors import UserError, require
from lockstep.flags import add_optional

AUTO = "auto"
FLAGS = ("budget", "error")


def add_flags(parser: Any) -> None:
    group = parser.add_argument_group(f"--fp32-islands {AUTO}, chosen by measurement here")
    add_optional(group, "--budget", "P%", "the islands that remove most of the gradient's error "
                 "for so much of a step's time, such as 5%% (default: not asked)")  # fmt: skip
    add_optional(group, "--error", "X", "the cheapest islands with which the gradient is so near "
                 "to float64's, such as 1e-3 (default: not asked)")  # fmt: skip


def take(given: dict[str, Any]) -> dict[str, float]:
    """Take the flags and `auto` itself out of `given`; return the goal, or nothing.

    Raises:
        UserError: not exactly one of the flags is given, or one without `auto`.
    """
    asked = {name: given.pop(name) for name in FLAGS if name in given}
    if given.get("fp32_islands") != AUTO:
        for name, value in asked.items():
            require(False, f"--{name}", value, f"needs --fp32-islands {AUTO}; give both")
        return {}
    require(len(asked) == 1, "--fp32-islands", AUTO, "give --budget or --error, one of them")
    del given["fp32_islands"]
    for mine, why in (("init", "measures weights that are drawn"), ("mesh", "is for one device")):
        remedy = f"--fp32-islands {AUTO} {why}; name islands"
        require(mine not in given, f"--{mine}", given.get(mine), remedy)
    return {name: _read(name, text) for name, text in asked.items()}


def _read(name: str, text: str) -> float:
    percent = name == "budget"
    try:
        value = float(text.removesuffix("%")) / 100 if percent else float(text)
    except ValueError:
        value = math.nan
    fits = 0 < value < math.inf and text.endswith("%") == percent
    example = "a share of a step's time, such as 5%" if percent else "above 0, such as 1e-3"
    require(fits, f"--{name}", text, f"must be {example}")
    return value


def resolve(framework: str, config: Config, goal: dict[str, float]) -> Config:
    """Replace `auto` by islands, so that the run can be repeated anywhere."""
    if not goal:
        return config
    from lockstep.parity import greedy_islands  # imports the instruments, which others do not need

    if config.mesh.size > 1:
        raise UserError(f"--mesh {config.mesh}: --fp32-islands {AUTO} is for one device")
    return config.replace(fp32_islands=greedy_islands.choose(framework, config, **goal))
