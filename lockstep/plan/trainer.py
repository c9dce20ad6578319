"""The trainer of a setting: the fields of its config, and the command that a user types."""

import argparse
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep import twin
from lockstep.config import PRESETS, ModelConfig
from lockstep.config.fields import flag_name
from lockstep.config.mesh import Mesh
from lockstep.errors import UserError
from lockstep.plan import shape
from lockstep.plan.recommend import ALL_AT_ONCE
from lockstep.plan.setting import Setting
from lockstep.weights.huggingface import INDEX, SINGLE


def command(given: argparse.Namespace, s: Setting, mesh: Mesh | None = None) -> list[str]:
    """Writes the command; only the flags for a model that a trainer's flags cannot express.

    For several machines it is the command of one: docs/runs.md says how each is started.
    """
    words: list[str] = []
    for name, value in flags(given, s, mesh).items():
        words += [flag_name(name)] if value is True else [flag_name(name), str(value)]
    if not name_model(given):
        return words
    module = ["-m", twin.trainer_module(s.framework)]
    if s.framework == "torch" and mesh and mesh.size > 1:
        here = min(mesh.size, given.per_machine)
        return ["torchrun", "--nproc-per-node", str(here), *module, *words]
    return ["python", *module, *words]


def flags(given: argparse.Namespace, s: Setting, mesh: Mesh | None = None) -> dict[str, Any]:
    """Lists the fields of a config, the model's first; `mesh` if devices were requested."""
    found = name_model(given) | ({"mesh": str(mesh)} if mesh else {})
    found |= {"policy": s.policy, "batch_size": s.rows, "accum": s.accum, "remat": s.remat}
    if s.scanned:
        found["layers"] = "scan"
    if s.loss_chunks != ALL_AT_ONCE:
        found["loss_chunks"] = s.loss_chunks
    if s.compiled:
        found["compile"] = True
    return found | ({"context": given.context} if given.context else {})


def name_model(given: argparse.Namespace) -> dict[str, Any]:
    """Lists the fields that give a trainer the planned model; empty if none can.

    They are a preset; `init` for a folder with weights; or a preset with other sizes, for a
    config.json without weights.
    """
    if given.model in PRESETS:
        return {"model": given.model}
    folder = Path(given.model)
    if any((folder / name).is_file() for name in (SINGLE, INDEX)):
        return {"init": given.model}
    wanted = shape.of(given.model, given.context)
    sizes = {"n_layer": wanted.n_layer, "n_head": wanted.n_head, "d_model": wanted.d_model,
             "context": wanted.context, "vocab": wanted.vocab}  # fmt: skip
    for preset in PRESETS:
        with suppress(UserError):  # sizes that no trainer takes
            found = shape.of_model(ModelConfig(model=preset, **PRESETS[preset] | sizes))
            if replace(found, name=wanted.name) == wanted:
                return {"model": preset} | sizes
    return {}


def run_cost(given: argparse.Namespace, tokens_per_second: float) -> dict[str, float]:
    """Computes days and cost of the whole run, if `--tokens` and `--price` are given."""
    if not given.tokens:
        return {}
    hours = given.tokens / tokens_per_second / 3600
    return {"days": hours / 24} | ({"cost": hours * given.price} if given.price else {})
