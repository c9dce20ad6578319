"""Recommends policy, remat, micro-batch and accumulation: those that fit, the fastest first."""

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from lockstep.devices import Device
from lockstep.errors import require
from lockstep.plan import memory, rates, roofline
from lockstep.plan.layers import fits_unrolled
from lockstep.plan.setting import CANDIDATES, KNOWN, Setting, counts_as_ampere
from lockstep.plan.shape import Shape

REMAT = ("none", "dots", "sublayer", "block", "sqrt")
ALL_AT_ONCE = "1"  # of --loss-chunks
ROOM = 0.9  # of the device's memory: fragments, the context and libraries take the rest
SAME = 1.05  # seconds this near are the same; the simpler one is taken then


@dataclass(frozen=True, kw_only=True)
class Choice:
    setting: Setting
    seconds: float  # of an optimizer step
    bytes: float  # state and step
    fits: bool
    native: bool


def judge_setting(shape: Shape, device: Device, s: Setting) -> Choice:
    """Counts the bytes and seconds of a setting on a device.

    JAX's recomputed layers are as `--layers auto` has them, and in a loop where it cannot predict.
    """
    again = s.framework == "jax" and s.remat != "none"
    s = replace(s, scanned=again and not fits_unrolled(shape, s, device.capabilities.memory))
    needed = memory.state_bytes(shape, s.roles) + memory.step_bytes(shape, s)
    return Choice(
        setting=s, seconds=roofline.seconds(shape, s, device), bytes=needed,
        fits=fits(needed, rates.find_memory_error(shape, s), device),
        native=device.native(s.roles.compute, s.roles.tf32),
    )  # fmt: skip


def fits(needed: float, error: dict[str, Any], device: Device) -> bool:
    """Says if a step fits: its prediction in `ROOM`, its largest possible bytes in the memory."""
    most = rates.range_bytes(needed, error)[1]
    return needed <= ROOM * device.memory and most <= device.memory


def choices(
    shape: Shape, device: Device, framework: str, tokens: int,
    micro_batch: int | None = None, loss_chunks: str | None = None,
    policies: tuple[str, ...] = CANDIDATES, remats: tuple[str, ...] = REMAT,
    *, compiled: bool = False,
) -> list[Choice]:  # fmt: skip
    """Lists every policy, remat mode, number of chunks, and split of `tokens` per step.

    If `tokens` divide badly, a step has more.
    """
    rows = max(1, -(-tokens // shape.context))
    sizes = [micro_batch] if micro_batch else [2**i for i in range(rows.bit_length())]
    chunkings = [loss_chunks] if loss_chunks else [ALL_AT_ONCE, "auto"]
    found = []
    for policy, remat, size, chunks in product(policies, remats, sizes, chunkings):
        setting = Setting(
            framework=framework, ampere=counts_as_ampere(device), policy=policy, remat=remat,
            rows=size, accum=-(-rows // size), loss_chunks=chunks, compiled=compiled,
        )  # fmt: skip
        if loss_chunks or chunks == ALL_AT_ONCE or setting.chunks(shape) > 1:
            found.append(judge_setting(shape, device, setting))
    return found


def read_names(flag: str, text: str | None, known: tuple[str, ...]) -> tuple[str, ...]:
    """Selects the requested names, in the order of all known ones; all if none is requested.

    Raises:
        UserError: one is not among them.
    """
    if text is None:
        return known
    names = text.split(",")
    require(set(names) <= {*known}, flag, text, f"unknown; use some of {','.join(known)}")
    return tuple(name for name in known if name in names)


def rows(found: list[Choice]) -> list[Choice]:
    """Finds the best split and chunks of each policy and remat mode."""
    kinds = dict.fromkeys((c.setting.policy, c.setting.remat) for c in found)
    return [find_best(found, *kind) for kind in kinds]


def rank(found: list[Choice]) -> list[Choice]:
    """Ranks the `rows` that fit, the best first; of equally fast ones the simpler first.

    Policies without units are left out if the device has units for another of `found`.
    """
    native = [c for c in found if c.native] or found
    left = [c for c in rows(native) if c.fits]
    order = []
    while left:
        order.append(take_first(left))
        left.remove(order[-1])
    return order


def take_first(left: list[Choice]) -> Choice:
    """Takes the simplest row that is as good as the fastest."""
    fastest = min(c.seconds for c in left)
    return min((c for c in left if c.seconds <= SAME * fastest), key=_simple)


def _simple(c: Choice) -> tuple[int, int, bool, int]:
    s = c.setting
    chunked = s.loss_chunks != ALL_AT_ONCE
    return REMAT.index(s.remat), KNOWN.index(s.policy), chunked, s.accum


def find_best(found: list[Choice], policy: str, remat: str) -> Choice:
    """Finds the best split of a policy and remat mode that fits; else the smallest."""
    mine = [c for c in found if (c.setting.policy, c.setting.remat) == (policy, remat)]
    fitting = [c for c in mine if c.fits]
    return take_first(fitting) if fitting else min(mine, key=lambda c: c.bytes)


def reason(shape: Shape, device: Device, best: Choice, found: list[Choice]) -> str:
    """Explains a recommendation by the costs of the alternatives."""
    reasons, s = [], best.setting
    for policy in dict.fromkeys(c.setting.policy for c in found):
        other = find_best(found, policy, s.remat)
        if policy != s.policy:
            why = _compare(other, best) if other.native else "multiplied in float32 here"
            reasons.append(f"{policy}: {why}")
    if s.remat == "none":
        reasons.append("it fits without remat, which costs time")
    elif any(c.setting.remat == "none" for c in found):
        plain = find_best(found, s.policy, "none")
        why = _compare(plain, best, f"not even {plain.setting.rows} row(s) fit")
        reasons.append(f"without remat: {why}")
    at_once = [c for c in found if c.setting.loss_chunks == ALL_AT_ONCE]
    if s.loss_chunks != ALL_AT_ONCE and at_once:
        why = _compare(find_best(at_once, s.policy, s.remat), best, "do not fit")
        reasons.append(f"the logits of all rows at once: {why}")
    whole = replace(s, rows=s.rows * s.accum, accum=1)
    if s.accum > 1 and not judge_setting(shape, device, whole).fits:
        reasons.append("all rows at once do not fit, so they are accumulated")
    return "; ".join(reasons)


def _compare(other: Choice, best: Choice, too_large: str = "does not fit") -> str:
    if not other.fits:
        return too_large
    if best.seconds / SAME <= other.seconds <= best.seconds * SAME:
        return "as fast, and less simple"
    return f"{other.seconds / best.seconds:.2g} x the time"
