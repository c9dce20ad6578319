"""Many devices: the data x fsdp meshes that fit, with each device's memory, bytes and time.

Bytes sent are those of the programs (`lockstep compile --mesh`, which the suite compares). Memory
is that of one device at its own peak (`lockstep/plan/memory.py`). How much of the sending hides
behind computing is not known: both ends are given.
"""

import argparse
from dataclasses import dataclass, replace
from typing import Any

from lockstep.config.mesh import MOST, Mesh
from lockstep.config.policy import BYTES
from lockstep.devices import Device
from lockstep.errors import UserError, require, require_range
from lockstep.plan import memory, rates, recommend, roofline, trainer
from lockstep.plan.recommend import ALL_AT_ONCE, SAME, Choice
from lockstep.plan.setting import Setting
from lockstep.plan.shape import Shape

INFINIBAND = 50e9  # bytes a second, one way: one NDR port, of 400 Gb/s, for each device
NAMES = ("nvlink", "pcie", "infiniband", "GB/s")
PER_MACHINE = 8
ALONE = ("price", "tokens")  # flags of a plan for one device


@dataclass(frozen=True, kw_only=True)
class Links:
    inside: float  # bytes a second between the devices of a machine
    between: float  # and of one device to other machines
    per_machine: int

    def speed(self, devices: int) -> float:
        """Returns the bytes/s of a ring of devices, limited by its slowest link."""
        return self.inside if devices <= self.per_machine else self.between


def read_links(given: argparse.Namespace, device: Device) -> Links:
    """
    Raises:
        UserError: a flag that does not go with `--devices`, or no link.
    """
    require_range("--devices", given.devices, 1, MOST)
    given.per_machine = PER_MACHINE if given.per_machine is None else given.per_machine
    require_range("--per-machine", given.per_machine, 1, MOST)
    for name in ALONE:
        require(not getattr(given, name), f"--{name}", getattr(given, name),
                f"is for one device; drop it or --devices {given.devices}")  # fmt: skip
    at_once = given.devices == 1 or given.loss_chunks in (None, ALL_AT_ONCE)
    remedy = f"is for one device, not for --devices {given.devices}; drop it"
    require(at_once, "--loss-chunks", given.loss_chunks, remedy)
    return Links(
        inside=read_link("--link", given.link or usual_link(device), device),
        between=read_link("--inter", given.inter or "infiniband", device),
        per_machine=given.per_machine,
    )


def read_link(flag: str, text: str, device: Device) -> float:
    """
    Raises:
        UserError: it is no name and no number above 0; or this device has no NVLink.
    """
    named = {"nvlink": device.nvlink, "pcie": device.pcie, "infiniband": INFINIBAND}
    if text in named:
        remedy = f"{device.name} is not known to have it; use pcie or GB/s"
        require(named[text] > 0, flag, text, remedy)
        return named[text]
    try:
        rate = float(text) * 1e9
    except ValueError:
        raise UserError(f"{flag} {text}: unknown; use {', '.join(NAMES)}") from None
    require(0 < rate < float("inf"), flag, text, "must be above 0")
    return rate


def usual_link(device: Device) -> str:
    return "nvlink" if device.nvlink else "pcie"


def meshes(devices: int) -> list[Mesh]:
    """Lists every mesh of these devices."""
    return [Mesh(devices // m, m) for m in range(1, devices + 1) if devices % m == 0]


def sent(shape: Shape, s: Setting, mesh: Mesh) -> tuple[float, float]:
    """Counts the bytes that one device sends in a step, in rings over fsdp and over data.

    JAX sends weights in the compute dtype, and a gradient after each micro-batch; PyTorch sends all
    in float32, and a gradient after the last.
    """
    jax = s.framework == "jax"
    wide = BYTES[s.roles.param]
    width = BYTES[s.roles.compute] if jax else wide
    multiplied = shape.weights - shape.looked_up
    tables = shape.looked_up + (shape.head_weights if shape.tied and jax else 0)
    whole = width * multiplied + wide * tables
    blocks = width * shape.block_weights * (2 if s.remat == "sqrt" else 1)
    reduced = wide * (multiplied + tables) * (s.accum if jax else 1)
    among_fsdp = (s.accum * (whole + blocks) + reduced) * (mesh.fsdp - 1) / mesh.fsdp
    if mesh.fsdp == 1:
        among_fsdp = 0.0
    return among_fsdp, 2 * reduced / mesh.fsdp * (mesh.data - 1) / mesh.data


def send_seconds(shape: Shape, s: Setting, mesh: Mesh, links: Links) -> float:
    """Computes the seconds of communication; the devices of one replica are neighbours."""
    among_fsdp, among_data = sent(shape, s, mesh)
    return among_fsdp / links.speed(mesh.fsdp) + among_data / links.speed(mesh.size)


def plan(
    given: argparse.Namespace, shape: Shape, device: Device, links: Links, framework: str,
    tokens: int,
) -> dict[str, Any]:  # fmt: skip
    """Plans a framework's meshes, and picks the fastest that fits; ties go to the smallest fsdp."""
    found = [(mesh, best(given, shape, device, framework, tokens, mesh, links))
             for mesh in meshes(given.devices)]  # fmt: skip
    rows = [describe(shape, c, mesh, links) for mesh, c in found]
    result: dict[str, Any] = {"framework": framework, "rows": rows, "recommended": None}
    if fitting := [(mesh, c) for mesh, c in found if c.fits]:
        fastest = min(c.seconds for _, c in fitting)
        mesh, c = next(each for each in fitting if each[1].seconds <= SAME * fastest)
        result["recommended"] = str(mesh)
        result["command"] = trainer.command(given, c.setting, mesh)
    return result


def best(
    given: argparse.Namespace, shape: Shape, device: Device, framework: str, tokens: int,
    mesh: Mesh, links: Links,
) -> Choice:  # fmt: skip
    """Finds the best setting on a mesh; the one with the smallest memory if nothing fits.

    Its seconds are those of computing, then sending.
    """
    rows = max(1, -(-tokens // shape.context) // mesh.size)
    # The trainers have chunks of the loss for one device.
    loss_chunks = given.loss_chunks if mesh.size == 1 else ALL_AT_ONCE
    found = []
    for c in recommend.choices(
        shape, device, framework, rows * shape.context, given.micro_batch, loss_chunks,
        given.policy, given.remat,
    ):  # fmt: skip
        s = c.setting
        if mesh.size > 1:  # what compiled programs were compared with; the command says so
            s = replace(s, scanned=framework == "jax" and s.remat != "none")
        needed = memory.parts(shape, s, mesh).total
        computing = roofline.seconds(shape, s, device, mesh.fsdp)
        seconds = computing + send_seconds(shape, s, mesh, links)
        error = rates.find_memory_error(shape, s, mesh.size)
        fits = recommend.fits(needed, error, device)
        found.append(replace(c, setting=s, bytes=needed, fits=fits, seconds=seconds))
    ordered = recommend.rank(found)
    if ordered:
        return ordered[0]
    return replace(min(found, key=lambda c: c.bytes), fits=False)


def describe(shape: Shape, c: Choice, mesh: Mesh, links: Links) -> dict[str, Any]:
    """Describes a row of the plan, as JSON."""
    s = c.setting
    seconds = send_seconds(shape, s, mesh, links)
    computing = c.seconds - seconds
    error = rates.find_memory_error(shape, s, mesh.size)
    return {
        "mesh": str(mesh), "policy": s.policy, "remat": s.remat, "rows": s.rows, "accum": s.accum,
        "fits": c.fits, "bytes": c.bytes, "bytes_range": rates.range_bytes(c.bytes, error),
        "sent_bytes": sum(sent(shape, s, mesh)),
        "compute_seconds": computing, "send_seconds": seconds,
        "seconds_at_least": max(computing, seconds), "seconds_at_most": c.seconds,
    }  # fmt: skip
