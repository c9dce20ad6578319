"""`lockstep compile`: its flags, and what it prints."""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

from lockstep import twin
from lockstep.compile import lints, report, rules, targets
from lockstep.compile.ask import Compiler
from lockstep.compile.program import Program
from lockstep.compile.targets import NAMES, Tpu
from lockstep.config import (
    Config,
    ExecutionConfig,
    ModelConfig,
    OptimConfig,
    PrecisionConfig,
    from_flags,
)
from lockstep.config.kinds import require_float64
from lockstep.config.tensors import shapes
from lockstep.errors import UserError, require
from lockstep.exits import DONE
from lockstep.flags import add_command, add_optional, add_sections, add_switch, add_text
from lockstep.run import directory

MOST_DEVICES = 4096  # XLA lists them all


def add(commands: Any) -> None:
    """Adds the subcommand."""
    sub = add_command(
        commands, "compile", _compile,
        "Compiles our JAX step for an absent CUDA device or TPU, or\n"
        "traces our PyTorch step for CUDA: dtypes of its matmuls, attention kernels,\nmemory, "
        "bytes moved. Nothing is run, and nothing is measured. Takes the\ntrainers' own flags.",
        "lockstep compile --device h100 --model gpt2 --batch-size 8",
        "lockstep compile --framework torch --device t4 --policy fp16",
        argument_default=argparse.SUPPRESS,
    )  # fmt: skip
    add_optional(sub, "--device", "NAME", ", ".join(NAMES), required=True)
    add_text(sub, "--framework", "|".join(twin.MODULES), "only this one (default: both)")
    add_sections(sub, ModelConfig, PrecisionConfig, OptimConfig, ExecutionConfig)
    add_switch(sub, "--json", "print the report as JSON", default=False)
    about = "write XLA's text of the compiled step to FILE (default: not)"
    add_text(sub, "--hlo", "FILE", about)


def _compile(given: argparse.Namespace) -> int:
    flags = vars(given)
    name, device, as_json, hlo, _ = (
        flags.pop(key) for key in ("framework", "device", "json", "hlo", "command")
    )
    islands, remedy = flags.get("fp32_islands"), "is chosen by a trainer, by measurement; name them"
    require(islands != "auto", "--fp32-islands", islands, remedy)
    target, config = targets.find(device), from_flags(flags, accelerator=True)
    remedy = f"programs are compiled for at most {MOST_DEVICES} devices; use less"
    require(config.mesh.size <= MOST_DEVICES, "--mesh", config.mesh, remedy)
    whole = len(config.trained) == len(shapes(config.model))
    remedy = "what is known of programs is of those that train all; drop it"
    require(whole, "--lora-rank or --freeze", config.optim.freeze or config.model.lora_rank, remedy)
    tpu = isinstance(target, Tpu)
    one, remedy = config.mesh.size == 1, "programs for a TPU are of one chip; drop it"
    require(one or not tpu, "--mesh", config.mesh, remedy)
    if tpu:
        require_float64("tpu", config.precision.policy, config.precision.roles)
    names = [name] if name else ["jax"] if tpu else list(twin.MODULES)
    if hlo:
        require(names == ["jax"], "--hlo", hlo, "XLA's text is of JAX alone; add --framework jax")
        directory.require_writable_file(Path(hlo), "--hlo")
    found: list[dict[str, Any]] = []
    compilers = [Compiler(each, type(target)) for each in names]
    for compiler in compilers:
        program = compiler.program(config, target.device.name, hlo=hlo)
        wrong = rules.violations(program, config, target)
        warned = report.warnings(program, config, target, wrong)
        warned += lints.find(program, config, partial(_other_program, compiler, target.device.name))
        compiler.close()
        if as_json:
            found.append(report.as_json(program, target, warned))
        else:
            print(report.as_text(program, target, warned), flush=True)
    if as_json:
        print(json.dumps(found, indent=1))
    return DONE


def _other_program(compiler: Compiler, device: str, config: Config) -> Program | None:
    """Returns the program of another setting; None if it does not fit the device."""
    try:
        return compiler.program(config, device)
    except UserError:
        return None
