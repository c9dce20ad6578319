"""A plan as plain text."""

import math
import shlex
from typing import Any

from lockstep import devices
from lockstep.config.policy import POLICIES
from lockstep.devices import Device
from lockstep.plan import rates, sizes
from lockstep.plan.recommend import ALL_AT_ONCE, SAME
from lockstep.plan.setting import Setting
from lockstep.plan.shape import Shape
from lockstep.plan.timing import LARGEST_SPREAD
from lockstep.plan.world import Links

GIB, MIB = 2**30, 2**20
MEASURED = ("h100", "h200")  # devices that our own rows are of: docs/benchmarks.md
ROW = "{:6} {:9}{:9}{:>9} " + "{:>9}" * 8 + "{:>9}{:>10}  {}"
LABELS = {"jax": "jax", "eager": "torch", "compiled": "torch, compiled"}
# In the order in which they are compared, by program.
COMPARED = {"jax": "JAX, which is compiled,", "compiled": "compiled PyTorch",
            "eager": "eager PyTorch"}  # fmt: skip
PARTS = {"parameters": "weights", "gradients": "grads", "accumulators": "accum", "moments": "Adam",
         "activations": "activ", "logits": "logits", "workspace": "work"}  # fmt: skip
RACE_ROW = "{:17}{:8}{:7}{:>12}{:>10}{:>6}{:>12}  {}"
MESH_ROW = "{:<18}{:8}{:10}{:>9}{:>9}{:>10}{:>10}{:>9}  {:>14}  {}"
MESH_ASSUMPTIONS = """\
Memory of one device at its own peak; other trainers may need less than what is assumed here.
Sent: a ring's bytes of one device. s/step: from all sending hidden behind computing to none.
Assumed: these trainers, our own fsdp, fused attention, eager PyTorch. Its weights are gathered in
float32, its gradients whole until the last micro-batch. None of it is measured, but computing is
held to published runs; lockstep compile --mesh asks the compilers. docs/plan.md"""


def one(model: Shape, device: Device, tokens: int, plans: list[dict[str, Any]]) -> str:
    """Writes the plan for one device: the answer, then the alternatives."""
    found = [*summary(plans), "", _head(model, device, tokens), "", *_table(plans)]
    found += [f"\n{_plan(each)}" for each in plans]
    return "\n".join([*found, f"\n{assumptions(device)}"])


def summary(plans: list[dict[str, Any]]) -> list[str]:
    """Writes a line for each framework (speed, memory, command), then their comparison."""
    best = choose(plans)
    lines = [f"{name + ':':7}{_predicted(each)}: {shlex.join(each['command'])}"
             for name, each in best.items()]  # fmt: skip
    nothing = [name for name in dict.fromkeys(each["framework"] for each in plans)
               if name not in best]  # fmt: skip
    lines += [f"{name + ':':7}nothing fits: take a smaller model or context, or more memory"
              for name in nothing]  # fmt: skip
    return [*lines, *_comparison(plans)]


def choose(plans: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Chooses each framework's plan that fits: compiled if that is faster."""
    best: dict[str, dict[str, Any]] = {}
    for each in plans:
        if each["recommended"] is None:
            continue
        before = best.setdefault(each["framework"], each)
        if _speed(each) > SAME * _speed(before):
            best[each["framework"]] = each
    return best


def _speed(plan: dict[str, Any]) -> float:
    rate: float = plan["recommended"]["predicted_tokens_per_second"]
    return rate


def _predicted(plan: dict[str, Any]) -> str:
    row = plan["recommended"]
    unit, name = (GIB, "GiB") if row["total_bytes"] >= GIB else (MIB, "MiB")
    size, low, high = (
        f"{count / unit:,.{1 if unit == GIB else 0}f}"
        for count in (row["total_bytes"], *row["bytes_range"])
    )
    error = row["seconds_error"]
    known = "at most" if error is None else f"± {error:.0%}"
    return (
        f"{_speed(plan):,.0f} tokens/s {known}, MFU {row['mfu']:.0%}, "
        f"{size} {name} ({low} to {high})"
    )


def _comparison(plans: list[dict[str, Any]]) -> list[str]:
    """Compares two programs' speeds, and says whether they differ by more than their errors."""
    fitting = {each["program"]: each for each in plans if each["recommended"]}
    first, *others = [name for name in COMPARED if name in fitting] or [""]
    told = [f"{_ratio(fitting[first], fitting[name])} of {COMPARED[name]}'s" for name in others]
    return [f"       predicted: {COMPARED[first]} has {' and '.join(told)} speed"] if told else []


def _ratio(mine: dict[str, Any], theirs: dict[str, Any]) -> str:
    ratio = _speed(mine) / _speed(theirs)
    errors = (each["recommended"]["seconds_error"] for each in (mine, theirs))
    error = math.hypot(*(error or 0.0 for error in errors))
    return f"{ratio:.2f}{' (within the errors)' if abs(math.log(ratio)) <= error else ''}"


def _table(plans: list[dict[str, Any]]) -> list[str]:
    """Writes a row of each program for each policy and remat mode."""
    rows = [row for each in plans for row in each["rows"]]
    large = max(row["total_bytes"] for row in rows) >= GIB
    unit, name = (GIB, "GiB") if large else (MIB, "MiB")
    modes = dict.fromkeys((row["policy"], row["remat"]) for row in rows)
    return [
        f"peak memory in {name}; torch is eager, compiled is torch with --compile:",
        ROW.format("policy", "remat", "program", "N x B", *PARTS.values(), "total", "s/step",
                   "tokens/s", "").rstrip(),
        *(_row(row, unit) for mode in modes for row in rows
          if (row["policy"], row["remat"]) == mode),
    ]  # fmt: skip


def many(model: Shape, device: Device, tokens: int, count: int, links: Links,
         plans: list[dict[str, Any]]) -> str:  # fmt: skip
    """Writes the plan for many devices."""
    inside, between = links.inside / 1e9, links.between / 1e9
    found = [
        *(_many_predicted(model, device, count, each) for each in plans),
        "",
        _head(model, device, tokens),
        f"{count} devices, {links.per_machine} a machine; each sends {inside:.4g} GB/s "
        f"inside of it, {between:.4g} outside",
    ]
    return "\n".join([*found, *(f"\n{_meshes(each)}" for each in plans), f"\n{MESH_ASSUMPTIONS}"])


def _many_predicted(model: Shape, device: Device, count: int, plan: dict[str, Any]) -> str:
    """Writes the recommended mesh: the speed of all devices, and the memory of one."""
    name = f"{plan['framework']}:"
    if plan["recommended"] is None:
        return f"{name:7}nothing fits: take more devices, or ones with more memory"
    row = next(row for row in plan["rows"] if row["mesh"] == plan["recommended"])
    tokens = row["rows"] * row["accum"] * model.context * count
    least, most = (tokens / row[key] for key in ("seconds_at_most", "seconds_at_least"))
    flops = model.flops_per_token / (count * device.peak(POLICIES[row["policy"]]))
    error = plan["errors"]["time"]["relative"]
    known = "at most" if error is None else f"± {error:.0%}"
    low, high = (size / GIB for size in row["bytes_range"])
    return (
        f"{name:7}{least:,.0f} to {most:,.0f} tokens/s {known}, MFU {least * flops:.0%} to "
        f"{most * flops:.0%}, {row['bytes'] / GIB:.1f} GiB ({low:.1f} to {high:.1f}) a device: "
        f"{shlex.join(plan['command'])}"
    )


def race_head(model: Shape, machine: str, first: Setting, minutes: float) -> str:
    """Writes what is raced: the model, the machine, and the tokens in a step."""
    batch = f"{first.accum} x {first.rows} sequences a step"
    return f"{_sizes(model)}\n{machine}: {batch}, at most {minutes:g} minutes"


def race_line(rows: list[dict[str, Any]]) -> str:
    """Writes the last cell, and the answer so far."""
    row = rows[-1]
    line = f"{LABELS[row['program']]}, {row['policy']}, remat {row['remat']}: "
    if "failed" in row:
        return line + row["failed"]
    fastest = max(each.get("tokens_per_second", 0) for each in rows)
    share = row["tokens_per_second"] / fastest
    so_far = "the fastest so far" if share == 1 else f"{share:.2f} of the fastest so far"
    return f"{line}{row['tokens_per_second']:,.0f} tokens/s, {so_far}"


def race_table(content: dict[str, Any]) -> str:
    """Writes the race's results, the fastest first, and the command to run."""
    able = [row for row in content["rows"] if "failed" not in row]
    if not able:
        return "\nnothing ran: see the reasons above; --micro-batch 1 needs the least memory"
    able.sort(key=lambda row: -row["tokens_per_second"])
    head = RACE_ROW.format("program", "policy", "remat", "tokens/s", "relative", "MFU", "peak", "")
    lines = ["", head.rstrip()]
    for row in able:
        share, mfu = row["tokens_per_second"] / able[0]["tokens_per_second"], row["mfu"]
        loose = row["spread"] > LARGEST_SPREAD
        lines.append(RACE_ROW.format(
            LABELS[row["program"]], row["policy"], row["remat"],
            f"{row['tokens_per_second']:,.0f}", f"{share:.2f}", f"{mfu:.0%}" if mfu else "-",
            _size(row["peak_bytes"]),
            f"steps spread by {row['spread']:.0%}: something else ran?" if loose else "",
        ).rstrip())  # fmt: skip
    lines.append(f"\nrun: {shlex.join(able[0]['command'])}")
    return "\n".join([*lines, *_cost(content)])


def _size(count: float) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"


def _sizes(shape: Shape) -> str:
    return (
        f"{shape.name}: {shape.weights / 1e6:,.1f} M parameters, L = {shape.n_layer}, "
        f"D = {shape.d_model}, T = {shape.context}, V = {shape.vocab}"
    )


def _head(shape: Shape, device: Device, tokens: int) -> str:
    capability = ".".join(map(str, device.capability)) if device.capability else "none"
    return (
        f"{_sizes(shape)}; {tokens:,} tokens a step\n"
        f"{device.name}: {device.memory / 1e9:.0f} GB, {device.bandwidth / 1e9:,.0f} GB/s; "
        f"{device.half / 1e12:.3g} TFLOP/s in 16 bit, {device.single / 1e12:.3g} in float32; "
        f"compute capability: {capability}"
    )


def _plan(plan: dict[str, Any]) -> str:
    """Writes the recommendation for a program, its errors and its cost."""
    label = LABELS[plan["program"]]
    if plan["recommended"] is None:
        return f"{label}: nothing fits: take a smaller model or context, or more memory"
    lines = [f"{label}, recommended: {shlex.join(plan['command'])}", f"  because {plan['reason']}",
             *(f"  {line}" for line in _errors(plan["errors"]))]  # fmt: skip
    if plan["sizes"]:
        lines.append(f"  {sizes.text(plan['sizes'])}")
    return "\n".join([*lines, *_cost(plan)])


def _errors(errors: dict[str, Any]) -> list[str]:
    """Writes the error bars, and the runs on which they were seen."""
    time, memory = errors["time"], errors["memory"]
    known = "time, error not known"
    if time["relative"] is not None:
        known = f"time ± {time['relative']:.0%}, on {time['runs']} runs that it was not fitted to"
    return [
        f"{known}: {time['how']}",
        f"memory {memory['lowest']:+.0%} to {memory['highest']:+.0%}, on {memory['programs']} "
        f"programs: {memory['how']}",
    ]


def _cost(plan: dict[str, Any]) -> list[str]:
    if "days" not in plan:
        return []
    cost = f", {plan['cost']:,.2f} in the unit of --price" if "cost" in plan else ""
    return [f"  the whole run: {plan['days']:,.2f} days{cost}"]


def _row(row: dict[str, Any], unit: int) -> str:
    remark = "" if row["native"] else "not native"
    if row["scanned"]:
        remark = f"--layers scan {remark}"
    if not row["fits"]:
        remark = "does not fit"
    elif row["loss_chunks"] != ALL_AT_ONCE:
        remark = f"--loss-chunks {row['loss_chunks']} {remark}"
    sizes = [row["bytes"][name] for name in PARTS] + [row["total_bytes"]]
    return ROW.format(
        row["policy"], row["remat"], "torch" if row["program"] == "eager" else row["program"],
        f"{row['accum']} x {row['rows']}",
        *(f"{size / unit:,.{2 if unit == GIB else 0}f}" for size in sizes),
        f"{row['predicted_seconds']:.3g}", f"{row['predicted_tokens_per_second']:,.0f}", remark,
    ).rstrip()  # fmt: skip


def _meshes(plan: dict[str, Any]) -> str:
    lines = [f"{plan['framework']}, of one device:",
             MESH_ROW.format("mesh", "policy", "remat", "N x B", "GiB", "sent, GB", "computes",
                             "sends", "s/step", "").rstrip()]  # fmt: skip
    for row in plan["rows"]:
        lines.append(MESH_ROW.format(
            row["mesh"], row["policy"], row["remat"], f"{row['accum']} x {row['rows']}",
            f"{row['bytes'] / GIB:,.2f}", f"{row['sent_bytes'] / 1e9:,.2f}",
            f"{row['compute_seconds']:.3g}", f"{row['send_seconds']:.3g}",
            f"{row['seconds_at_least']:.3g} to {row['seconds_at_most']:.3g}",
            "" if row["fits"] else "does not fit",
        ).rstrip())  # fmt: skip
    if plan["recommended"] is None:
        return "\n".join([*lines, "nothing fits: take more devices, or ones with more memory"])
    return "\n".join([*lines, f"recommended: {shlex.join(plan['command'])}"])


def proof(device: Device) -> str:
    """Writes the evidence that the twins work on a device."""
    if device.name in devices.TPUS:
        return "proven by compile (JAX)"
    if device.name not in devices.GPUS:
        return "not tried, by its data sheet"
    measured = "measured, " * (device.name in MEASURED)
    return f"{measured}proven by compile (JAX), traced (torch)"


def assumptions(device: Device) -> str:
    """Says where memory and seconds come from, and which of them are not measured."""
    narrow = ", ".join(name for name, roles in POLICIES.items() if roles.recipe)
    share, nearest = rates.find(device), rates.NAMES[rates.nearest(device)]
    native = device.capabilities.recipes
    by_hand = "They are emulated, in at least fp32's memory and time"
    if native:
        own = ", ".join(name for name in POLICIES if name in native)
        by_hand = f"Units of the device multiply {own}; in memory and time that is not counted yet"
    return (
        f"Not planned: {narrow}. {by_hand}.\n"
        "Assumed: these trainers, fused attention, float32 weights, moments and gradients; over "
        "several devices our own fsdp. Other programs need more or less.\n"
        f"Seconds: what must be multiplied and moved, at shares of the data sheet's rates that "
        f"published runs on {' and '.join(rates.NAMES.values())} reach: here {nearest}'s, "
        f"{share.rest:.0%}, and attention at {share.attention:.0%}.\n"
        f"This device: {proof(device)}.\n"
        "Memory: fitted to compiled (JAX) and traced (torch) programs for H100, A100 and T4; of "
        "compiled torch counted. The command `compile` asks about one, --measure races "
        "them here.\n"
        "docs/plan.md holds all of it against published runs, the worst first."
    )
