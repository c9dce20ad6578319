"""Which policy, remat, micro-batch and accumulation: everything that fits, the fastest first."""

from dataclasses import dataclass, replace

from lockstep.config.policy import POLICIES
from lockstep.devices import CPU, Device
from lockstep.plan import memory, roofline
from lockstep.plan.setting import Setting
from lockstep.plan.shape import Shape

# In the order of what has least to go wrong: bfloat16 needs no loss scale, and loses range nowhere.
CANDIDATES = ("fp32", "tf32", "bf16", "fp16")
REMAT = ("none", "dots", "sublayer", "block", "sqrt")
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
        native=device.native(setting.roles.compute, setting.roles.tf32, setting.account),
    )  # fmt: skip


def choices(shape: Shape, device: Device, framework: str, tokens: int,
            micro_batch: int | None = None) -> list[Choice]:  # fmt: skip
    """Every policy, remat mode and split of `tokens` a step; at least `tokens`, if they divide
    badly."""
    rows = max(1, -(-tokens // shape.context))
    sizes = [micro_batch] if micro_batch else [2**i for i in range(rows.bit_length())]
    found = []
    for policy in CANDIDATES:
        if device.resident and POLICIES[policy].tf32:  # emulated there: for parity, never for speed
            continue
        for remat in REMAT:
            for size in sizes:
                setting = Setting(
                    framework=framework, account=account(framework, device),
                    roles=POLICIES[policy], remat=remat, rows=size, accum=-(-rows // size),
                    libraries=CPU["libraries"][framework] if device.resident else 0.0,
                )  # fmt: skip
                found.append(choice(shape, device, policy, setting))
    return found


def account(framework: str, device: Device) -> str:
    """Whose constants hold. JAX's own are those of XLA's CPU backend, which writes attention out
    and widens bfloat16; until they are measured on an accelerator, torch's stand for it there."""
    return framework if device.resident else "torch"


def rows(found: list[Choice]) -> list[Choice]:
    """The best split of each policy and remat mode."""
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


def _simple(c: Choice) -> tuple[int, int, int]:
    return REMAT.index(c.setting.remat), CANDIDATES.index(c.policy), c.setting.accum


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
    whole = replace(best.setting, rows=best.setting.rows * best.setting.accum, accum=1)
    if best.setting.accum > 1 and not choice(shape, device, best.policy, whole).fits:
        reasons.append("all rows at once do not fit, so they are accumulated")
    return "; ".join(reasons)


def _compare_times(theirs: float, ours: float) -> str:
    if ours / SAME <= theirs <= ours * SAME:
        return "as fast, and less simple"
    return f"{theirs / ours:.2g} x the time"
