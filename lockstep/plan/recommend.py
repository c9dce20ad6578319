"""Which policy, remat, micro-batch and accumulation: everything that fits, the fastest first."""

from dataclasses import dataclass, replace
from itertools import product

from lockstep.config.policy import POLICIES
from lockstep.devices import CPU, Device
from lockstep.plan import memory, roofline
from lockstep.plan.setting import KEPT, Setting, backend
from lockstep.plan.shape import Shape

# In the order of what has least to go wrong: bfloat16 needs no loss scale, and loses range nowhere.
CANDIDATES = ("fp32", "tf32", "bf16", "fp16")
REMAT = ("none", "dots", "sublayer", "block", "sqrt")
ALL_AT_ONCE = "1"  # of --loss-chunks
ROOM = 0.9  # of the device's memory: fragments, the context and libraries take the rest
SAME = 1.05  # seconds this near are the same; the simpler one is taken then


@dataclass(frozen=True, kw_only=True)
class Choice:
    policy: str
    setting: Setting
    seconds: float  # of an optimizer step
    bytes: float  # state and step
    fits: bool
    native: bool


def choice(shape: Shape, device: Device, policy: str, setting: Setting) -> Choice:
    needed = memory.state_bytes(shape, setting.roles) + memory.step_bytes(shape, setting)
    return Choice(
        policy=policy, setting=setting, seconds=roofline.seconds(shape, setting, device),
        bytes=needed, fits=needed <= ROOM * device.memory,
        native=device.native(setting.roles.compute, setting.roles.tf32, setting.framework),
    )  # fmt: skip


def choices(
    shape: Shape, device: Device, framework: str, tokens: int,
    micro_batch: int | None = None, loss_chunks: str | None = None,
) -> list[Choice]:  # fmt: skip
    """Every policy, remat mode, chunks of the loss and split of `tokens` a step; at least `tokens`,
    if they divide badly."""
    rows = max(1, -(-tokens // shape.context))
    sizes = [micro_batch] if micro_batch else [2**i for i in range(rows.bit_length())]
    chunkings = [loss_chunks] if loss_chunks else [ALL_AT_ONCE, "auto"]
    found = []
    for policy in CANDIDATES:
        if device.resident and POLICIES[policy].tf32:  # emulated there: for parity, never for speed
            continue
        for remat, size, chunks in product(REMAT, sizes, chunkings):
            setting = Setting(
                framework=framework, backend=backend(device), roles=POLICIES[policy], remat=remat,
                rows=size, accum=-(-rows // size), loss_chunks=chunks,
                libraries=CPU["libraries"][framework] if device.resident else 0.0,
                spare=KEPT[framework] if device.resident else 0,
            )  # fmt: skip
            if loss_chunks or chunks == ALL_AT_ONCE or setting.chunks(shape) > 1:
                found.append(choice(shape, device, policy, setting))
    return found


def rows(found: list[Choice]) -> list[Choice]:
    """The best split and chunks of each policy and remat mode."""
    return [best_of(found, policy, remat) for policy in policies(found) for remat in REMAT]


def policies(found: list[Choice]) -> list[str]:
    return list(dict.fromkeys(choice.policy for choice in found))


def rank(found: list[Choice]) -> list[Choice]:
    """Of `rows` those that fit and are native, the best first; of equally fast ones the simpler."""
    left = [c for c in rows(found) if c.fits and c.native]
    order = []
    while left:
        order.append(first(left))
        left.remove(order[-1])
    return order


def first(left: list[Choice]) -> Choice:
    """The simplest of those that are as good as the fastest."""
    fastest = min(c.seconds for c in left)
    return min((c for c in left if c.seconds <= SAME * fastest), key=_simple)


def _simple(c: Choice) -> tuple[int, int, bool, int]:
    s = c.setting
    chunked = s.loss_chunks != ALL_AT_ONCE
    return REMAT.index(s.remat), CANDIDATES.index(c.policy), chunked, s.accum


def best_of(found: list[Choice], policy: str, remat: str) -> Choice:
    """Of the splits of one policy and remat mode the first in rank that fits, else the smallest."""
    mine = [c for c in found if c.policy == policy and c.setting.remat == remat]
    fitting = [c for c in mine if c.fits]
    return first(fitting) if fitting else min(mine, key=lambda c: c.bytes)


def reason(shape: Shape, device: Device, best: Choice, found: list[Choice]) -> str:
    """Why this one, made from what the others would have cost."""
    reasons = []
    others = {p: best_of(found, p, best.setting.remat) for p in policies(found) if p != best.policy}
    for policy, other in others.items():
        if not other.native:
            why = "multiplied in float32 here"
        elif not other.fits:
            why = "does not fit"
        else:
            why = _compare_times(other.seconds, best.seconds)
        reasons.append(f"{policy}: {why}")
    plain = best_of(found, best.policy, "none")
    if best.setting.remat != "none":
        reasons.append("without remat: " + (
            _compare_times(plain.seconds, best.seconds) if plain.fits
            else f"not even {plain.setting.rows} row(s) fit"
        ))  # fmt: skip
    else:
        reasons.append("it fits without remat, which costs time")
    at_once = [c for c in found if c.setting.loss_chunks == ALL_AT_ONCE]
    if best.setting.loss_chunks != ALL_AT_ONCE and at_once:
        other = best_of(at_once, best.policy, best.setting.remat)
        why = _compare_times(other.seconds, best.seconds) if other.fits else "do not fit"
        reasons.append(f"the logits of all rows at once: {why}")
    whole = replace(best.setting, rows=best.setting.rows * best.setting.accum, accum=1)
    if best.setting.accum > 1 and not choice(shape, device, best.policy, whole).fits:
        reasons.append("all rows at once do not fit, so they are accumulated")
    return "; ".join(reasons)


def _compare_times(theirs: float, ours: float) -> str:
    if ours / SAME <= theirs <= ours * SAME:
        return "as fast, and less simple"
    return f"{theirs / ours:.2g} x the time"
