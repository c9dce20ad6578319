"""The trainer of a choice: the fields of its config, and the command that a user types."""

import argparse
from typing import Any

from lockstep import twin
from lockstep.config import PRESETS
from lockstep.config.fields import flag_name
from lockstep.config.mesh import Mesh
from lockstep.plan.recommend import ALL_AT_ONCE, Choice


def command(
    given: argparse.Namespace, framework: str, c: Choice, mesh: Mesh | None = None
) -> list[str]:
    """For a preset; the flags alone otherwise. Of several machines the command of one:
    docs/distributed.md has how each is started."""
    words = [word for name, value in flags(given, framework, c, mesh).items()
             for word in (flag_name(name), str(value))]  # fmt: skip
    if given.model not in PRESETS:
        return words[2:]
    module = ["-m", twin.trainer_module(framework)]
    if framework == "torch" and mesh and mesh.size > 1:
        here = min(mesh.size, given.per_machine)
        return ["torchrun", "--nproc-per-node", str(here), *module, *words]
    return ["python", *module, *words]


def flags(
    given: argparse.Namespace, framework: str, c: Choice, mesh: Mesh | None = None
) -> dict[str, Any]:
    """The fields of a config, the model first; `mesh` where a number of devices was asked for."""
    s = c.setting
    found = {"model": given.model} | ({"mesh": str(mesh)} if mesh else {})
    found |= {"policy": c.policy, "batch_size": s.rows, "accum": s.accum}
    if s.remat != "none":
        found |= {"remat": s.remat} | ({"layers": "scan"} if framework == "jax" else {})
    if s.loss_chunks != ALL_AT_ONCE:
        found["loss_chunks"] = s.loss_chunks
    return found | ({"context": given.context} if given.context else {})
