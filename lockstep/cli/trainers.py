"""A trainer's command line: its flags, read off `lockstep.config`, and its exit status."""

import argparse
import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lockstep import twin
from lockstep.cli import auto_islands, processes, programs
from lockstep.config import Config, ModelConfig, from_flags, policy
from lockstep.config.fields import flag_name
from lockstep.config.mesh import Mesh, parse_mesh
from lockstep.config.model import OF_A_RUN
from lockstep.errors import UserError, require
from lockstep.exits import exit_status
from lockstep.flags import Parser, add_optional, add_sections, add_switch
from lockstep.run import directory
from lockstep.train import autotune, options, trainer
from lockstep.weights import init
from lockstep.weights.source import LONGEST

MAY_CHANGE = (
    "steps", "policy", "eval_every", "eval_batches", "save_every", "keep", "max_skips",
    "device", "mesh", "autotune",
)  # fmt: skip
OTHER_WAYS = {"policy", "device", "mesh"}  # with another of these another way may be the fastest
MAY_CHANGE_FLAGS = ", ".join(map(flag_name, MAY_CHANGE))
EXAMPLES = """\
example:
  python -m {module} --policy bf16 --steps 1000
"""


def train(framework: str, argv: Sequence[str] | None = None) -> int:
    """Trains with a trainer's flags; returns the exit status.

    The framework is imported only when the flags are known to be right.
    """

    def run() -> int:
        config, out, resume, watching = read_flags(framework, argv)
        build = partial(twin.load, framework)
        with trainer.open_loop(config, build, out, resume=resume, watching=watching) as loop:
            loop.run()  # each step: twin.step(window)
        return loop.status

    status = exit_status(run)
    twin.end(framework, status)
    return status


def read_flags(
    framework: str, argv: Sequence[str] | None
) -> tuple[Config, Path | None, bool, options.Watching]:
    """Reads a trainer's flags: the config, the run's directory, whether it goes on, what to watch.

    Raises:
        UserError: a flag's value or directory is not usable, or flags exclude each other.
    """
    given = vars(trainer_parser(twin.trainer_module(framework)).parse_args(argv))
    out, resume, overwrite = (given.pop(name, None) for name in ("out", "resume", "overwrite"))
    many = {name: given.pop(name) for name in processes.FLAGS if name in given}
    watching = options.take(given)
    goal = auto_islands.take(given)
    programs.keep(framework, anew=given.pop(programs.FLAG, False))
    require(out != "", "--out", "''", "is empty; name a directory")
    run = Path(out) if out else None
    if resume:
        require(
            not goal,
            "--fp32-islands",
            auto_islands.AUTO,
            "the run keeps the islands that it began with; drop it",
        )
        require(not overwrite, "--resume", "--overwrite", "exclude each other; drop one")
        if run is None:
            raise UserError("--resume: no run is named; give --out RUN")
        config = _resumed_config(framework, run, given)
        processes.announce(many, config.mesh)
    else:
        processes.announce(many, parse_mesh(given["mesh"]) if "mesh" in given else None)
        if run:
            directory.require_free(run, overwrite=bool(overwrite))
        else:
            directory.require_writable(directory.RUNS)
        given.setdefault("autotune", autotune.default())
        config = auto_islands.resolve(framework, resolve_config(framework, given), goal)
    return autotune.resolve(framework, config), run, bool(resume), watching


def resolve_config(framework: str, given: dict[str, Any]) -> Config:
    """Resolves the config; looks for devices only for --model auto or without --mesh."""
    auto = given.get("model", "auto") == "auto"
    model = _init_model(given)
    try:
        config = from_flags(given, accelerator=True, model=model)
    except UserError:
        config = from_flags(given, accelerator=False, model=model)
    accelerator = auto and not model and twin.module(framework).has_accelerator(config.run.device)
    config = from_flags(given, accelerator=accelerator, model=model)
    if "mesh" in given:
        return config
    devices = twin.module(framework).device_count(config.run.device)
    return config.replace(mesh=str(Mesh(data=devices)))


def _init_model(given: dict[str, Any]) -> ModelConfig | None:
    """Open the model of --init, at most LONGEST tokens long: a flag may ask for more."""
    if not given.get("init"):
        return None
    fixed = {f.name for f in dataclasses.fields(ModelConfig)} - {*OF_A_RUN}
    for name in fixed & given.keys():
        require(False, flag_name(name), given[name], "the model is that of --init; drop it")
    model = init.open_source(given["init"]).model
    longest = model.context
    context = given.get("context", longest)
    remedy = f"the model has {longest} positions; use at most {longest}"
    require(context <= longest, "--context", context, remedy)
    return dataclasses.replace(model, context=min(longest, LONGEST))


def _resumed_config(framework: str, out: Path, given: dict[str, Any]) -> Config:
    """Returns the run's own config, with the flags that may change replaced."""
    record = directory.read_record(out)
    config = record.config
    if record.framework != framework or OTHER_WAYS & given.keys():
        given = {"autotune": autotune.default(), **given}
    for name, value in given.items():
        remedy = f"may not change on --resume; only {MAY_CHANGE_FLAGS} may"
        require(name in MAY_CHANGE, flag_name(name), value, remedy)
    if "policy" in given:
        old, new = config.precision.roles.param, policy.resolve(given["policy"]).param
        remedy = f"keeps weights and moments in {new}, the run has {old}; use a policy with that"
        require(old == new, "--policy", given["policy"], remedy)
    if "mesh" in given:
        rows, size = config.global_batch_size, parse_mesh(given["mesh"]).size
        remedy = f"does not divide the run's {rows} rows of a micro-batch; use a divisor of them"
        require(rows % size == 0, "--mesh", given["mesh"], remedy)
        given = {**given, "batch_size": rows // size}
    return config.replace(**given)


def trainer_parser(module: str) -> Parser:
    """Builds a parser: a group for each section of `Config`, a flag for each field with a help."""
    parser = Parser(
        prog=f"python -m {module}",
        usage=f"python -m {module} [flags]",
        description="Trains a GPT with mixed precision. Both trainers take the same flags "
        "and\ndo the same run. Capital letters are the shapes of the model's arrays.",
        epilog=EXAMPLES.format(module=module),
        argument_default=argparse.SUPPRESS,
    )
    group = add_sections(parser, *(section.type for section in dataclasses.fields(Config)))
    about = "the run's directory (default: a new one, named runs/FRAMEWORK-MODEL-POLICY)"
    add_optional(group, "--out", "DIR", about)
    about = f"go on with the run in --out, with its own config; only {MAY_CHANGE_FLAGS} may change"
    add_switch(group, "--resume", about)
    add_switch(group, "--overwrite", "replace the run in --out")
    programs.add_flag(parser)
    auto_islands.add_flags(parser)
    options.add_flags(parser)
    if module == twin.trainer_module("jax"):
        processes.add_flags(parser)
    return parser
