"""The instruments' commands: `lockstep curves`, `power`, `specificity` and `sensitivity`."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from lockstep import results, twin
from lockstep.check.twins import describe_difference
from lockstep.config import (
    DataConfig,
    ExecutionConfig,
    ModelConfig,
    OptimConfig,
    PrecisionConfig,
    RunConfig,
    from_flags,
)
from lockstep.config.fields import require_choice
from lockstep.errors import require, require_range
from lockstep.exits import DONE, FAILED
from lockstep.flags import (
    add_command,
    add_device,
    add_flag,
    add_number,
    add_sections,
    add_switch,
    add_text,
    read_device,
    say_places,
)
from lockstep.judge.verdict import Verdict
from lockstep.parity import catalogue, curves, power, sensitivity, specificity
from lockstep.run import directory

SECTIONS = (ModelConfig, DataConfig, OptimConfig)


def add(commands: Any) -> None:
    """Add the four subcommands."""
    _add_curves(commands)
    _add_power(commands)
    _add_specificity(commands)
    _add_sensitivity(commands)


def _add_curves(commands: Any) -> None:
    sub = add_command(
        commands, "curves", _curves,
        "Trains A and B in separate processes, also from perturbed weights;\n"
        "tests whether the gap between the curves stays within their rounding noise.",
        "lockstep curves jax:bf16 torch:bf16",
        argument_default=argparse.SUPPRESS,
    )  # fmt: skip
    about = "FRAMEWORK:POLICY[:compile|fast|strict], such as jax:bf16, or a run's directory"
    for side in ("A", "B"):
        sub.add_argument(side.lower(), metavar=side, help=about)
    add_sections(sub, *SECTIONS, defaults=curves.DEFAULTS)
    for section, name in ((PrecisionConfig, "loss_scale_init"), (ExecutionConfig, "remat"),
                          (RunConfig, "device")):  # fmt: skip
        add_flag(sub, next(f for f in dataclasses.fields(section) if f.name == name))
    sub.add_argument("--out", metavar="DIR", help="where to write curves.json and curves.png "
                     "(default: runs/curves-A-B)")  # fmt: skip
    about = (
        "plant a bug in the operand of its framework, with the settings under which it shows where "
        "no flag says otherwise; `lockstep power --list` names them (default: none)"
    )
    add_text(sub, "--bug", "NAME[=SIZE]", about)


def _add_power(commands: Any) -> None:
    sub = add_command(
        commands, "power", _power,
        "Mutation testing: plants each bug in its twin and climbs every rung against\n"
        "the other, unchanged twin. x: caught; .: not caught; ?: inconclusive; empty:\n"
        "no such rung there.",
        "lockstep power norm-eps clip-before-unscale", "lockstep power --list",
    )  # fmt: skip
    sub.add_argument("bugs", metavar="BUG", nargs="*", help="a bug's name (default: all)")
    add_switch(sub, "--list", "name the bugs and end")
    add_switch(sub, "--grade", "find the smallest size at which each graded bug is caught")
    _add_device_and_out(sub)


def _add_specificity(commands: Any) -> None:
    sub = add_command(
        commands, "specificity", _specificity,
        "Climbs the rungs with fresh seeds and with semantics-preserving variants of\n"
        "either twin, and counts false positives.",
    )  # fmt: skip
    parts = ", ".join(specificity.PARTS)
    sub.add_argument("parts", metavar="PART", nargs="*", help=f"{parts} (default: all)")
    add_number(sub, "--seeds", 20, "seeds of weights and batches for every rung")
    add_number(sub, "--curve-seeds", 50, "seeds for rung 8, the curves")
    _add_device_and_out(sub)


def _add_sensitivity(commands: Any) -> None:
    sub = add_command(
        commands, "sensitivity", _sensitivity,
        "Compares the gradient with float64: with one module at a time in half\n"
        "precision, and with all but one; times a step with each kind of module in\n"
        "float32; reports which --fp32-islands are worth it.",
        "lockstep sensitivity --policy bf16 --framework torch",
        argument_default=argparse.SUPPRESS,
    )  # fmt: skip
    add_text(sub, "--policy", "TEXT", "the policy with half precision, or tf32", "bf16")
    sub.add_argument("--framework", default="torch", metavar="|".join([*twin.MODULES, "both"]),
                     help="the twins that compute (default: torch, without compiling)")  # fmt: skip
    add_sections(sub, *SECTIONS, defaults=sensitivity.DEFAULTS)
    _add_device_and_out(sub)


def _add_device_and_out(sub: Any) -> None:
    add_device(sub, "where the twins run")
    add_text(sub, "--out", "FILE", "write the rows to FILE as JSON (default: not)")


def _power(given: argparse.Namespace) -> int:
    if given.list:
        for bug in catalogue.BUGS:
            size = f"={bug.size:g}" if bug.size is not None else ""
            print(f"{bug.name + size:28} {bug.framework:6} {bug.what}")
        return DONE
    if given.grade:
        require(not given.bugs, "--grade", given.bugs, "takes no names; it has its own five")
        power.grade(read_device(given), _out_file(given), _say)
        return DONE
    return DONE if power.run(given.bugs, read_device(given), _out_file(given), _say) else FAILED


def _specificity(given: argparse.Namespace) -> int:
    require_range("--seeds", given.seeds, 1)
    require_range("--curve-seeds", given.curve_seeds, 1)
    quiet = specificity.run(
        given.parts, given.seeds, given.curve_seeds, read_device(given), _out_file(given), _say
    )
    return DONE if quiet else FAILED


def _sensitivity(given: argparse.Namespace) -> int:
    framework = given.framework
    require_choice("--framework", framework, (*twin.MODULES, "both"))
    chosen = list(twin.MODULES) if framework == "both" else [framework]
    device, out = read_device(given, chosen), _out_file(given)
    own = {k: v for k, v in vars(given).items() if k not in ("framework", "out", "command")}
    config = from_flags({**sensitivity.DEFAULTS, **own, "device": device}, accelerator=False)
    sensitivity.run(config, chosen, out, _say)
    return DONE


def _say(line: str) -> None:
    print(line, flush=True)


def _out_file(given: argparse.Namespace) -> Path | None:
    if not given.out:
        return None
    path = Path(given.out)
    directory.require_writable_file(path)
    results.read(path)  # what is none is not written over
    return path


def _curves(given: argparse.Namespace) -> int:
    flags = vars(given)
    a, b, bug, _ = (flags.pop(name) for name in ("a", "b", "bug", "command"))
    stem = "curves-" + "-".join(Path(side).name.replace(":", "-") for side in (a, b))
    out = Path(flags.pop("out", directory.RUNS / stem))
    directory.require_writable(out)
    frameworks = {side.partition(":")[0] for side in (a, b)}
    say_places(flags.get("device", "auto"), sorted(frameworks & {*twin.MODULES}))
    verdict = curves.run(a, b, flags, out, bug, describe_difference)
    return FAILED if verdict is Verdict.DIFFERENT else DONE
