"""`lockstep plan`: its flags, its report, and `--measure`."""

import argparse
import json
from dataclasses import replace
from functools import partial
from typing import Any

from lockstep import devices, twin
from lockstep.config import PRESETS, chunks
from lockstep.config.fields import flag_name
from lockstep.devices import Device
from lockstep.errors import require, require_range
from lockstep.exits import DONE
from lockstep.flags import add_command, add_number, add_optional, add_switch
from lockstep.plan import (
    memory,
    race,
    rates,
    recommend,
    report,
    roofline,
    shape,
    sizes,
    trainer,
    world,
)
from lockstep.plan.recommend import Choice
from lockstep.plan.setting import CANDIDATES, KNOWN
from lockstep.plan.shape import Shape

LARGE = 100_000_000  # parameters, from which a step has half a million tokens, as GPT-2's had
TOKENS = (2**16, 2**19)  # a step's, below and from LARGE
PROGRAMS = {"jax": "jax", "torch": "eager"}  # that are planned for several devices
COMPILES = ("cuda", "rocm", "xpu")  # platforms on which PyTorch's compiler has Triton
ON_CPU = "a CPU's memory and time are not predicted; add --measure, which times them here"
TOGETHER = ("link", "inter", "per_machine")  # flags of `--devices`


def add(commands: Any) -> None:
    """Adds the subcommand."""
    sub = add_command(
        commands, "plan", _plan,
        "Predicts memory and time of a training step for each policy and remat mode,\n"
        "and recommends one; imports no framework. --measure predicts nothing: it races\n"
        "JAX and PyTorch on this machine, a GPU or a CPU, for ten minutes.",
        "lockstep plan --model gpt2 --device h200",
        "lockstep plan --model DIR --device a100-80 --tokens 1e9 --price 1.8",
        "lockstep plan --model 1b --device h100 --devices 16 --inter 25",
        "lockstep plan --model gpt2 --measure --out rows.jsonl",
    )  # fmt: skip
    add = partial(add_optional, sub)
    links = "|".join(world.NAMES)
    add("--model", "NAME", f"{', '.join(PRESETS)}; a folder as for the trainers' --init; or a "
        "Hugging Face config.json", required=True)  # fmt: skip
    add("--device", "NAME", f"{', '.join(devices.DEVICES)}; with --measure only {race.CPU} "
        "(default: an NVIDIA GPU if there is one)")  # fmt: skip
    add("--memory", "GB", "the device's memory (default: its data sheet's)", float)
    add("--context", "T", "tokens a sequence (default: the model's)", int)
    add("--tokens-per-step", "N", f"tokens in an optimizer step (default: {TOKENS[0]}; from "
        f"{LARGE // 10**6} M parameters {TOKENS[1]}; with --measure a micro-batch)",
        int)  # fmt: skip
    add("--micro-batch", "B", "sequences in a micro-batch (default: chosen; with --measure at "
        f"most {race.MOST_ROWS}, on a CPU {race.FEW_ROWS})", int)  # fmt: skip
    add("--policy", "NAMES", f"consider only these of {','.join(KNOWN)} "
        f"(default: {','.join(CANDIDATES)})")  # fmt: skip
    add("--remat", "NAMES", f"consider only these of {','.join(recommend.REMAT)} (default: all)")
    add("--loss-chunks", "N|auto", "chunks of head and loss, as in the trainers (default: chosen)")
    add("--tokens", "X", "tokens of the whole run; prints its days (default: not asked)", float)
    add("--price", "X", "price of the device for an hour, in any unit; prints the run's cost "
        "(default: not asked)", float)  # fmt: skip
    add("--framework", "|".join(twin.MODULES), "plan only this one (default: both)")
    add_switch(sub, "--measure", "race the programs on this machine")
    add_number(sub, "--minutes", race.MINUTES, "with --measure: when it ends")
    add("--out", "FILE", "with --measure: keep the rows, as JSON lines")
    add("--devices", "N", "compare the meshes of this many devices (default: one)", int)
    add("--link", links, "rate between devices of a machine, one direction (default: nvlink if "
        "the device has it, else pcie)")  # fmt: skip
    add("--inter", links, "rate from a device to other machines (default: infiniband, 50)")
    add("--per-machine", "N", f"devices of a machine (default: {world.PER_MACHINE})", int)
    add_switch(sub, "--json", "print the plan as JSON")


def _plan(given: argparse.Namespace) -> int:
    _check(given)
    model = shape.of(given.model, given.context)
    if given.measure:
        race.check(given)
        raced = race.run(given, model)
        return _print(given, {"shape": vars(model), **raced}, report.race_table(raced))
    remedy = f"name what to predict, or give --measure; one of {', '.join(devices.DEVICES)}"
    require(given.device is not None, "--device", "missing", remedy)
    require(given.device.lower() != race.CPU, "--device", given.device, ON_CPU)
    device = devices.find(given.device)
    asked = ",".join(CANDIDATES) if given.policy is None else given.policy
    given.policy = recommend.read_names("--policy", asked, KNOWN)
    given.remat = recommend.read_names("--remat", given.remat, recommend.REMAT)
    if given.memory is not None:
        device = replace(device, memory=given.memory * devices.GB)
    names = list(device.frameworks) if given.framework is None else [given.framework]
    twin.require_known(names[0])
    remedy = f"does not run on {device.name}; use {', '.join(device.frameworks)}"
    require(names[0] in device.frameworks, "--framework", names[0], remedy)
    tokens = given.tokens_per_step or TOKENS[model.weights >= LARGE]
    content: dict[str, Any] = {"shape": vars(model), "device": vars(device)}
    if given.devices is not None:
        links = world.read_links(given, device)
        plans = [world.plan(given, model, device, links, name, tokens)
                 | {"errors": {"time": _time_error(model, device, PROGRAMS[name])}}
                 for name in names]  # fmt: skip
        content |= {"links": vars(links), "devices": given.devices, "plans": plans}
        text = report.many(model, device, tokens, given.devices, links, plans)
        return _print(given, content, text)
    plans = [plan(model, device, name, tokens, given, compiled=compiled)
             for name in names for compiled in programs(name, device)]  # fmt: skip
    content |= {"plans": plans, "assumptions": report.assumptions(device)}
    return _print(given, content, report.one(model, device, tokens, plans))


def _print(given: argparse.Namespace, content: dict[str, Any], text: str) -> int:
    print(json.dumps(content, indent=1) if given.json else text)
    return DONE


def _check(given: argparse.Namespace) -> None:
    for name in ("context", "tokens_per_step", "micro_batch"):
        if getattr(given, name) is not None:
            require_range(flag_name(name), getattr(given, name), 1, 2**31 - 1)
    if given.loss_chunks is not None:
        chunks.check(given.loss_chunks)
    for name in ("memory", "tokens", "price"):
        value = getattr(given, name)
        if value is not None:
            require(0 < value < float("inf"), f"--{name}", value, "must be above 0")
    if given.price is not None:
        require(given.tokens is not None, "--price", given.price, "of how many --tokens? give both")
    if not given.measure:
        require(given.out is None, "--out", given.out, "is of --measure; give both")
    if given.framework is not None:
        twin.require_known(given.framework)
    if given.devices is None:
        for name in TOGETHER:
            value = getattr(given, name)
            require(value is None, flag_name(name), value, "is of several; give --devices, too")


def programs(framework: str, device: Device) -> tuple[bool, ...]:
    """Chooses whether PyTorch is planned eager, compiled, or both; JAX compiles in any case."""
    return (False, True) if framework == "torch" and device.platform in COMPILES else (False,)


def plan(model: Shape, device: Device, framework: str, tokens: int, given: argparse.Namespace,
         *, compiled: bool = False) -> dict[str, Any]:  # fmt: skip
    """Makes a program's predictions and recommendation, as JSON."""
    found = recommend.choices(
        model, device, framework, tokens, given.micro_batch, given.loss_chunks,
        given.policy, given.remat, compiled=compiled,
    )  # fmt: skip
    ordered = recommend.rank(found)
    rows = [describe(model, device, c) for c in recommend.rows(found)]
    first = (ordered or found)[0].setting
    result: dict[str, Any] = {
        "framework": framework, "program": first.program, "rows": rows, "recommended": None,
        "errors": {"time": _time_error(model, device, first.program),
                   "memory": rates.find_memory_error(model, first)},
    }  # fmt: skip
    if ordered:
        best = ordered[0]
        result["recommended"] = describe(model, device, best)
        result["reason"] = recommend.reason(model, device, best, found)
        result["command"] = trainer.command(given, best.setting)
        result["sizes"] = sizes.check(model, best.setting, device)
        result |= trainer.run_cost(given, best.setting.tokens(model) / best.seconds)
    return result


def _time_error(model: Shape, device: Device, program: str) -> dict[str, Any]:
    """Returns the error of a program's predictions, and the runs on which it was seen."""
    return rates.find_error(device, program, model.weights)._asdict()


def describe(model: Shape, device: Device, c: Choice) -> dict[str, Any]:
    """Describes a row of the plan, as JSON.

    `seconds_error` is relative, or null; `bytes_range` goes from the least to the most that the
    prediction's known errors allow.
    """
    parts, s = memory.parts(model, c.setting), c.setting
    rate = s.tokens(model) / c.seconds
    error = rates.find_memory_error(model, s)
    time_error = rates.find_error(device, s.program, model.weights).relative
    return {
        "program": s.program, "policy": s.policy, "remat": s.remat, "rows": s.rows,
        "accum": s.accum, "loss_chunks": s.loss_chunks, "scanned": s.scanned,
        "fits": c.fits, "native": c.native,
        "bytes": vars(parts), "total_bytes": parts.total,
        "bytes_range": rates.range_bytes(parts.total, error),
        "predicted_seconds": c.seconds, "seconds_error": time_error,
        "bound_seconds": roofline.bound(model, s, device),
        "predicted_tokens_per_second": rate,
        "mfu": rate * model.flops_per_token / device.peak(s.roles),
    }  # fmt: skip
