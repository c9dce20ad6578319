"""`lockstep plan --devices N`: its flags, the meshes it compares, its report."""

import argparse
import json
import shlex
from typing import Any

from lockstep.config.mesh import MOST
from lockstep.devices import Device
from lockstep.errors import require, require_range
from lockstep.exits import DONE
from lockstep.flags import reader
from lockstep.plan import report, world
from lockstep.plan.recommend import ALL_AT_ONCE, SAME
from lockstep.plan.shape import Shape
from lockstep.plan.trainer import command

ROW = "{:<18}{:8}{:10}{:>9}{:>9}{:>10}{:>10}{:>9}  {:>14}  {}"
ALONE = ("exact", "measure", "price", "tokens")
TOGETHER = ("link", "inter", "per_machine")
PER_MACHINE = 8


def add_flags(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--devices", type=reader(int), metavar="N",
                     help="so many of the device: compare their meshes (default: one)")  # fmt: skip
    names = "|".join(world.NAMES)
    sub.add_argument("--link", metavar=names,
                     help="between devices of a machine, one direction (default: nvlink where the "
                     "device has it, else pcie)")  # fmt: skip
    sub.add_argument("--inter", metavar=names,
                     help="from a device to other machines (default: infiniband, 50)")  # fmt: skip
    sub.add_argument("--per-machine", type=reader(int), metavar="N",
                     help="devices of a machine (default: 8)")  # fmt: skip


def run(
    given: argparse.Namespace, shape: Shape, device: Device, names: list[str], tokens: int
) -> int:
    links = _links(given, device)
    plans = [plan(given, shape, device, links, name, tokens) for name in names]
    if given.json:
        print(json.dumps({"shape": vars(shape), "device": vars(device), "links": vars(links),
                          "devices": given.devices, "plans": plans}, indent=1))  # fmt: skip
        return DONE
    print(report.head(shape, device, tokens))
    inside, between = links.inside / 1e9, links.between / 1e9
    print(f"{given.devices} devices, {links.per_machine} a machine; each sends {inside:.4g} GB/s "
          f"inside of it, {between:.4g} outside")  # fmt: skip
    for each in plans:
        print(f"\n{text(each)}")
    print(f"\n{ASSUMPTIONS}")
    return DONE


ASSUMPTIONS = """\
Memory of one device: the plan's own, what fsdp divides divided, and what is whole for a while.
Sent: a ring's bytes of one device. s/step: from all sending hidden behind computing to none.
None of it is measured; lockstep compile --mesh asks the compilers. docs/plan.md"""


def _links(given: argparse.Namespace, device: Device) -> world.Links:
    require_range("--devices", given.devices, 1, MOST)
    given.per_machine = PER_MACHINE if given.per_machine is None else given.per_machine
    require_range("--per-machine", given.per_machine, 1, MOST)
    for name in ALONE:
        require(not getattr(given, name), f"--{name}", getattr(given, name),
                f"is for one device; drop it or --devices {given.devices}")  # fmt: skip
    at_once = given.devices == 1 or given.loss_chunks in (None, ALL_AT_ONCE)
    remedy = f"is for one device, not for --devices {given.devices}; drop it"
    require(at_once, "--loss-chunks", given.loss_chunks, remedy)
    chosen = given.link or world.usual_link(device)
    return world.Links(inside=world.link("--link", chosen, device),
                       between=world.link("--inter", given.inter or "infiniband", device),
                       per_machine=given.per_machine)  # fmt: skip


def plan(
    given: argparse.Namespace, shape: Shape, device: Device, links: world.Links, framework: str,
    tokens: int,
) -> dict[str, Any]:  # fmt: skip
    """One framework's meshes, and the first of those that fit: of equally fast ones with least
    fsdp, which sends less where links are worse than thought."""
    found = []
    for mesh in world.meshes(given.devices):
        best = world.best(shape, device, framework, tokens, mesh, links,
                          given.micro_batch, given.loss_chunks)  # fmt: skip
        found.append((mesh, best))
    rows = [world.describe(shape, best, mesh, links) for mesh, best in found]
    fitting = [(mesh, c) for mesh, c in found if c.fits and c.native]
    result: dict[str, Any] = {"framework": framework, "rows": rows, "recommended": None}
    if fitting:
        fastest = min(c.seconds for _, c in fitting)
        mesh, c = next(each for each in fitting if each[1].seconds <= SAME * fastest)
        result["recommended"] = str(mesh)
        result["command"] = command(given, framework, c, mesh)
    return result


def text(plan: dict[str, Any]) -> str:
    lines = [f"{plan['framework']}, of one device:",
             ROW.format("mesh", "policy", "remat", "N x B", "GiB", "sent, GB", "computes", "sends",
                        "s/step", "").rstrip()]  # fmt: skip
    for row in plan["rows"]:
        lines.append(ROW.format(
            row["mesh"], row["policy"], row["remat"], f"{row['accum']} x {row['rows']}",
            f"{row['bytes'] / report.GIB:,.2f}", f"{row['sent_bytes'] / 1e9:,.2f}",
            f"{row['compute_seconds']:.3g}", f"{row['send_seconds']:.3g}",
            f"{row['seconds_at_least']:.3g} to {row['seconds_at_most']:.3g}",
            "" if row["fits"] else "does not fit",
        ).rstrip())  # fmt: skip
    if plan["recommended"] is None:
        return "\n".join([*lines, "nothing fits: take more devices, or ones with more memory"])
    return "\n".join([*lines, f"recommended: {shlex.join(plan['command'])}"])
