"""`lockstep plan`: its flags, its report, and `--measure`."""

import argparse
import json
from dataclasses import replace
from typing import Any

from lockstep import devices, twin
from lockstep.compile import targets
from lockstep.config import PRESETS, chunks
from lockstep.config.fields import flag_name
from lockstep.devices import Device
from lockstep.errors import require, require_range
from lockstep.exits import DONE
from lockstep.flags import reader
from lockstep.plan import checklist, exact, many, memory, recommend, report, shape, sizes, timing
from lockstep.plan.recommend import Choice
from lockstep.plan.shape import Shape
from lockstep.plan.trainer import command, flags

LARGE = 100_000_000  # parameters, from which a step has half a million tokens, as GPT-2's had
TOKENS = (2**16, 2**19)  # a step's, below and from LARGE
BEST = 3  # candidates that --exact and --measure ask about


def add(commands: Any) -> None:
    """The subcommand."""
    sub = commands.add_parser(
        "plan",
        description="Predicts memory and time of a training step for each policy and remat mode,\n"
        "and recommends one. Asks no framework; --exact asks the compilers about the best\n"
        "three, --measure times them here.",
        epilog="examples:\n  lockstep plan --model gpt2 --device h200\n"
        "  lockstep plan --model config.json --device t4 --tokens 1e9 --price 0.35\n"
        "  lockstep plan --model 1b --device h100 --devices 16 --inter 25",
    )
    sub.add_argument("--model", required=True, metavar="|".join((*PRESETS, "FILE")),
                     help="a preset, or a Hugging Face config.json")  # fmt: skip
    sub.add_argument("--device", required=True, metavar="NAME",
                     help=", ".join(devices.DEVICES))  # fmt: skip
    sub.add_argument("--memory", type=reader(float), metavar="GB",
                     help="the device's memory (default: its data sheet's)")  # fmt: skip
    sub.add_argument("--context", type=reader(int), metavar="T",
                     help="tokens a sequence (default: the model's)")  # fmt: skip
    sub.add_argument("--tokens-per-step", type=reader(int), metavar="N",
                     help=f"of an optimizer step (default: {TOKENS[0]}; from {LARGE // 10**6} M "
                     f"parameters {TOKENS[1]})")  # fmt: skip
    sub.add_argument("--micro-batch", type=reader(int), metavar="B",
                     help="sequences in a micro-batch (default: chosen)")  # fmt: skip
    sub.add_argument("--loss-chunks", metavar="N|auto",
                     help="of head and loss, as trainers take them (default: chosen)")  # fmt: skip
    sub.add_argument("--tokens", type=reader(float), metavar="X",
                     help="of the whole run: how many days? (default: not asked)")  # fmt: skip
    sub.add_argument("--price", type=reader(float), metavar="X",
                     help="of the device for an hour, in any unit: what does the run cost? "
                     "(default: not asked)")  # fmt: skip
    sub.add_argument("--framework", metavar="|".join(twin.MODULES),
                     help="this one alone (default: both)")  # fmt: skip
    sub.add_argument("--exact", action="store_true",
                     help="compile or trace the best three for the device, which need not be here, "
                     "and say what the formula is off by (default: off)")  # fmt: skip
    sub.add_argument("--measure", action="store_true",
                     help="time the best three on this machine (default: off)")  # fmt: skip
    many.add_flags(sub)
    sub.add_argument("--json", action="store_true", help="print it as JSON (default: off)")
    sub.set_defaults(command=_plan)


def _plan(given: argparse.Namespace) -> int:
    device, model = devices.find(given.device), shape.of(given.model, given.context)
    _check(given)
    if given.memory is not None:
        device = replace(device, memory=given.memory * devices.GB)
    names = list(device.frameworks) if given.framework is None else [given.framework]
    twin.require_known(names[0])
    remedy = f"does not run on {device.name}; use {', '.join(device.frameworks)}"
    require(names[0] in device.frameworks, "--framework", names[0], remedy)
    tokens = given.tokens_per_step or TOKENS[model.weights >= LARGE]
    if given.devices is not None:
        return many.run(given, model, device, names, tokens)
    plans = [plan(model, device, name, tokens, given) for name in names]
    advice = checklist.rows(names)
    if given.json:
        result = {"shape": vars(model), "device": vars(device), "plans": plans,
                  "checklist": advice, "assumptions": report.assumptions(device)}  # fmt: skip
        print(json.dumps(result, indent=1))
        return DONE
    print(report.head(model, device, tokens))
    for each in plans:
        print(f"\n{report.text(each)}")
    print(f"\n{checklist.text(advice)}\n\n{report.assumptions(device)}")
    return DONE


def _check(given: argparse.Namespace) -> None:
    for name in ("context", "tokens_per_step", "micro_batch"):
        if getattr(given, name) is not None:
            require_range("--" + name.replace("_", "-"), getattr(given, name), 1, 2**31 - 1)
    if given.loss_chunks is not None:
        chunks.check(given.loss_chunks)
    for name in ("memory", "tokens", "price"):
        value = getattr(given, name)
        if value is not None:
            require(0 < value < float("inf"), f"--{name}", value, "must be above 0")
    if given.price is not None:
        require(given.tokens is not None, "--price", given.price, "of how many --tokens? give both")
    for name in ("exact", "measure"):
        if getattr(given, name):
            remedy = f"only a preset can be trained; drop --{name}"
            require(given.model in PRESETS, f"--{name}", given.model, remedy)
    if given.exact:
        targets.find(given.device)
    if given.devices is None:
        for name in many.TOGETHER:
            value = getattr(given, name)
            require(value is None, flag_name(name), value, "is of several; give --devices, too")


def plan(model: Shape, device: Device, framework: str, tokens: int,
         given: argparse.Namespace) -> dict[str, Any]:  # fmt: skip
    """One framework's predictions and recommendation, as JSON."""
    found = recommend.choices(
        model, device, framework, tokens, given.micro_batch, given.loss_chunks
    )
    ordered = recommend.rank(found)
    rows = [describe(model, c) for c in recommend.rows(found)]
    result: dict[str, Any] = {"framework": framework, "rows": rows, "recommended": None}
    if ordered:
        best = ordered[0]
        result["recommended"] = describe(model, best)
        result["reason"] = recommend.reason(model, device, best, found)
        result["command"] = command(given, framework, best)
        result["sizes"] = sizes.check(model, best.setting, device)
        if given.tokens:
            result |= run_cost(model, best, given)
        if given.measure:
            result["measured"] = [
                describe(model, c) | timing.measure(command(given, framework, c))
                for c in ordered[:BEST]
            ]
        if given.exact:
            rows = [describe(model, c) | {"flags": flags(given, framework, c)}
                    for c in ordered[:BEST]]  # fmt: skip
            result["compiled"] = exact.ask(framework, device.name, rows)
    return result


def describe(model: Shape, c: Choice) -> dict[str, Any]:
    parts = memory.parts(model, c.setting)
    tokens = c.setting.rows * c.setting.accum * model.context
    return {
        "policy": c.policy, "remat": c.setting.remat, "rows": c.setting.rows,
        "accum": c.setting.accum, "loss_chunks": c.setting.loss_chunks, "fits": c.fits,
        "native": c.native, "bytes": vars(parts),
        "total_bytes": parts.total, "predicted_seconds": c.seconds,
        "predicted_tokens_per_second": tokens / c.seconds,
    }  # fmt: skip


def run_cost(model: Shape, best: Choice, given: argparse.Namespace) -> dict[str, float]:
    """Days and cost of the whole run."""
    step = best.setting.rows * best.setting.accum * model.context
    hours = given.tokens / step * best.seconds / 3600
    return {"days": hours / 24} | ({"cost": hours * given.price} if given.price else {})
