"""Many devices: which meshes of data x fsdp fit, what each device keeps and sends, and how long.

Bytes sent are those of the programs (`lockstep compile --mesh`, which the suite compares). Memory
is that of one device, with what fsdp divides divided, and with what is whole for a while. How much
of the sending hides behind computing is not known: both ends are given.
"""

import argparse
from dataclasses import dataclass, replace
from typing import Any

from lockstep.config.mesh import MOST, Mesh
from lockstep.config.policy import BYTES
from lockstep.devices import Device
from lockstep.errors import UserError, require, require_range
from lockstep.plan import memory, recommend, trainer
from lockstep.plan.recommend import ALL_AT_ONCE, ROOM, SAME, Choice
from lockstep.plan.setting import Setting
from lockstep.plan.shape import Shape
from lockstep.plan.terms import LAST, LOSS, TERMS

INFINIBAND = 50e9  # bytes a second, one way: one NDR port, of 400 Gb/s, for each device
NAMES = ("nvlink", "pcie", "infiniband", "GB/s")
PER_MACHINE = 8
ALONE = ("exact", "measure", "price", "tokens")  # flags of a plan for one device


@dataclass(frozen=True, kw_only=True)
class Links:
    inside: float  # bytes a second between the devices of a machine
    between: float  # and of one device to other machines
    per_machine: int

    def speed(self, devices: int) -> float:
        """Bytes a second in a ring of so many neighbours, no faster than its slowest link."""
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
    """Every way to share them out."""
    return [Mesh(devices // m, m) for m in range(1, devices + 1) if devices % m == 0]


def kept(shape: Shape, s: Setting, mesh: Mesh) -> float:
    """Bytes of one device at its peak."""
    if mesh.fsdp == 1:
        return memory.parts(shape, s).total
    return (_kept_by_xla if s.framework == "jax" else _kept_by_torch)(shape, s, mesh)


def _kept_by_torch(shape: Shape, s: Setting, mesh: Mesh) -> float:
    """The state divided, and gradients, each after its block. Whole for a while are all but the
    other blocks: weights, gradients, and the buffer that sends them."""
    parts, width = memory.parts(shape, s), BYTES[s.roles.param]
    state = parts.parameters + parts.moments + parts.accumulators
    divided = (state + width * shape.weights) / mesh.fsdp
    block, root = shape.block_weights / shape.n_layer, shape.looked_up + shape.head_weights
    kept_whole = shape.block_weights if s.accum > 1 else 0  # until the last micro-batch
    whole = width * (3 * (block + root) + kept_whole)
    return divided + whole + parts.activations + parts.logits + parts.workspace


def _kept_by_xla(shape: Shape, s: Setting, mesh: Mesh) -> float:
    """Follows XLA's buffer assignment, at the loss and in the last block's backward pass. The
    gradients that one device has whole are divided there, so that another moment is the peak.

    In both: without copies of the model the look-up's gradient, whole zeros from the loss on; of
    layers in a loop, the matrices that read the stream turned over, with N > 1 their moments and
    sums too.
    """
    width, compute = BYTES[s.roles.param], BYTES[s.roles.compute]
    block, head = shape.block_weights / shape.n_layer, shape.head_weights
    state = width * shape.weights * (3 + (s.accum > 1)) / mesh.fsdp
    reads = shape.d_queries + 2 * shape.d_keys + (1 + shape.gated) * shape.d_mlp
    turned = width * shape.d_model * reads * shape.n_layer / mesh.fsdp * s.scanned
    zeros = width * head * (mesh.data == 1)
    both = state + zeros + turned * (4 if s.accum > 1 else 1)
    given = {moment: sum(n for name, n in found.items() if not TERMS[name].divided)
             for moment, found in memory.moments(shape, s).items()}  # fmt: skip
    blocks = 0 if s.scanned else shape.block_weights  # gathered ahead, for the backward pass
    # The head, its gradient, and a device's part of that; zeros for two of the MLP's come early.
    early = width * 2 * shape.d_model * shape.d_mlp * shape.n_layer / mesh.fsdp
    at_loss = given[LOSS] + compute * (head + blocks) + width * (1 + 1 / mesh.fsdp) * head
    at_loss += early * (s.scanned and s.accum == 1)
    # Gradients of all layers, divided, and of one that is whole, as are its weights.
    last = given[LAST] + width * shape.block_weights / mesh.fsdp
    return both + max(at_loss, last + compute * (block + blocks) + width * block)


def sent(shape: Shape, s: Setting, mesh: Mesh) -> tuple[float, float]:
    """Bytes that one device sends in a step, in rings: among fsdp, and among data. JAX sends
    weights in the compute dtype, and a gradient after each micro-batch; PyTorch all in float32, and
    a gradient after the last."""
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
    """The devices that share a copy are neighbours."""
    among_fsdp, among_data = sent(shape, s, mesh)
    return among_fsdp / links.speed(mesh.fsdp) + among_data / links.speed(mesh.size)


def plan(
    given: argparse.Namespace, shape: Shape, device: Device, links: Links, framework: str,
    tokens: int,
) -> dict[str, Any]:  # fmt: skip
    """One framework's meshes, and the first of those that fit: of equally fast ones with least
    fsdp, which sends less where links are worse than thought."""
    found = [(mesh, best(shape, device, framework, tokens, mesh, links,
                         given.micro_batch, given.loss_chunks))
             for mesh in meshes(given.devices)]  # fmt: skip
    rows = [describe(shape, c, mesh, links) for mesh, c in found]
    result: dict[str, Any] = {"framework": framework, "rows": rows, "recommended": None}
    if fitting := [(mesh, c) for mesh, c in found if c.fits and c.native]:
        fastest = min(c.seconds for _, c in fitting)
        mesh, c = next(each for each in fitting if each[1].seconds <= SAME * fastest)
        result["recommended"] = str(mesh)
        result["command"] = trainer.command(given, c.setting, mesh)
    return result


def best(
    shape: Shape, device: Device, framework: str, tokens: int, mesh: Mesh, links: Links,
    micro_batch: int | None = None, loss_chunks: str | None = None,
) -> Choice:  # fmt: skip
    """The best setting on a mesh; its seconds are those of computing, then sending. With the
    smallest memory where nothing fits."""
    rows = max(1, -(-tokens // shape.context) // mesh.size)
    if mesh.size > 1:
        loss_chunks = ALL_AT_ONCE  # the trainers have them for one device
    found = []
    for c in recommend.choices(
        shape, device, framework, rows * shape.context, micro_batch, loss_chunks
    ):
        needed = kept(shape, c.setting, mesh)
        seconds = c.seconds + send_seconds(shape, c.setting, mesh, links)
        fits = needed <= ROOM * device.memory
        found.append(replace(c, bytes=needed, fits=fits, seconds=seconds))
    ordered = recommend.rank(found)
    return ordered[0] if ordered else min(found, key=lambda c: c.bytes)


def describe(shape: Shape, c: Choice, mesh: Mesh, links: Links) -> dict[str, Any]:
    """A row of the plan, as JSON."""
    s = c.setting
    seconds = send_seconds(shape, s, mesh, links)
    computing = c.seconds - seconds
    return {
        "mesh": str(mesh), "policy": s.policy, "remat": s.remat, "rows": s.rows, "accum": s.accum,
        "fits": c.fits, "bytes": c.bytes, "sent_bytes": sum(sent(shape, s, mesh)),
        "compute_seconds": computing, "send_seconds": seconds,
        "seconds_at_least": max(computing, seconds), "seconds_at_most": c.seconds,
    }  # fmt: skip
