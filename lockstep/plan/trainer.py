"""The trainer of a setting: the fields of its config, and the command that a user types."""

import argparse
from typing import Any

from lockstep import twin
from lockstep.config import PRESETS
from lockstep.config.fields import flag_name
from lockstep.config.mesh import Mesh
from lockstep.plan.recommend import ALL_AT_ONCE
from lockstep.plan.setting import Setting


def command(given: argparse.Namespace, s: Setting, mesh: Mesh | None = None) -> list[str]:
    """The command for a preset, and the flags alone for another model.

    For several machines it is the command of one: docs/distributed.md says how each is started.
    """
    words: list[str] = []
    for name, value in flags(given, s, mesh).items():
        words += [flag_name(name)] if value is True else [flag_name(name), str(value)]
    if given.model not in PRESETS:
        return words[2:]
    module = ["-m", twin.trainer_module(s.framework)]
    if s.framework == "torch" and mesh and mesh.size > 1:
        here = min(mesh.size, given.per_machine)
        return ["torchrun", "--nproc-per-node", str(here), *module, *words]
    return ["python", *module, *words]


def flags(given: argparse.Namespace, s: Setting, mesh: Mesh | None = None) -> dict[str, Any]:
    """The fields of a config, the model first; `mesh` where a number of devices was asked for."""
    found = {"model": given.model} | ({"mesh": str(mesh)} if mesh else {})
    found |= {"policy": s.policy, "batch_size": s.rows, "accum": s.accum}
    if s.remat != "none":
        found |= {"remat": s.remat} | ({"layers": "scan"} if s.framework == "jax" else {})
    if s.loss_chunks != ALL_AT_ONCE:
        found["loss_chunks"] = s.loss_chunks
    if s.compiled:
        found["compile"] = True
    return found | ({"context": given.context} if given.context else {})


def run_cost(given: argparse.Namespace, tokens_per_second: float) -> dict[str, float]:
    """Days and cost of the whole run, where `--tokens` and `--price` ask for them."""
    if not given.tokens:
        return {}
    hours = given.tokens / tokens_per_second / 3600
    return {"days": hours / 24} | ({"cost": hours * given.price} if given.price else {})
