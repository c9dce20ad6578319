"""A compiled or traced program as plain text, and its roofline."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from lockstep.compile.expected import narrow_units
from lockstep.compile.program import GROUPS, PARTS, PHASES, Collective, Kernel, Program
from lockstep.compile.targets import Gpu, Target
from lockstep.config import Config

GB = 1e9
TOP = 10
WORTH = 0.05  # of a peak: what a warning is worth
SPILLS = 8_192  # bytes: products spill up to 1,300 or so; JAX's flash attention in float32 104,156


def seconds(kernel: Kernel, target: Target) -> float | None:
    """Returns the longer of a kernel's times to move and to multiply, at the data sheet's rates."""
    moved = kernel.bytes / target.device.bandwidth
    rate = target.rate(kernel.units) if kernel.flops else 1.0
    return None if rate is None else max(moved, kernel.flops / rate) * kernel.times


def roofline(program: Program, target: Target) -> dict[str, float] | None:
    """Sums seconds by group of kernels; None if the device's rate is not known."""
    found: Counter[str] = Counter()
    for kernel in program.kernels:
        each = seconds(kernel, target)
        if each is None:
            return None
        found[kernel.group] += each  # type: ignore[assignment]
    return dict(found)


def warnings(program: Program, config: Config, target: Target, wrong: list[str]) -> list[str]:
    """Lists warnings for a user before a run; `wrong`: from `rules.violations`."""
    roles, found = config.precision.roles, []
    wanted = "tf32" if roles.tf32 else roles.compute
    units, policy = target.units(roles.compute, roles.tf32), config.precision.policy
    if units not in (wanted, "float64"):
        name = {"bfloat16x3": "three products of bfloat16"}.get(units, units)
        half = "fp16" if target.units("float16") == "float16" else "bf16"
        found.append(f"{policy} on a {target.device.name} multiplies in {name}; use {half}")
    by_hand = {own.recipe for own in config.precision.all_roles if not narrow_units(own, target)}
    for recipe in sorted(by_hand - {""}):
        found.append(f"{recipe} is emulated: operands are rounded to it, and multiplied in float32")
    if "no cuDNN" in program.attention_asked or program.attention_asked.endswith("math"):
        found.append(f"the fused kernel refuses this shape or device: {program.attention_asked}")
    if program.peak > target.memory:
        over = f"{program.peak / GB:.1f} GB of {target.memory / GB:.1f}"
        found.append(f"the peak does not fit: {over}; use --remat or a smaller --batch-size")
    if logits := kept_by_cublas(program, config, target):
        both = bytes_text(program.peak + logits)
        found.append(f"on the device XLA may take cuBLAS for the head: {both}, logits twice")
    for kernel, count in program.spills.items():
        if count > SPILLS:
            found.append(f"{kernel} spills {count:,} bytes of registers a thread: it waits for "
                         "memory, which no figure here has")  # fmt: skip
    return found + wrong


def kept_by_cublas(program: Program, config: Config, target: Target) -> int:
    """Counts the bytes of logits that are kept on a device, where XLA takes cuBLAS for the head.

    In this program the loss's gradient overwrites them
    (docs/decisions/speed-and-compilers.md). Here XLA takes cuBLAS for the head only
    before Ampere, under strict numerics, and where it may take nothing else.
    """
    precision = config.precision
    alone = precision.leaves_triton(config.model.biased)
    gpu = program.framework == "jax" and isinstance(target, Gpu)
    chooses = gpu and target.ampere and not (precision.strict or alone)
    logits = program.parts.get("logits", 0) if chooses else 0
    return logits if logits > WORTH * program.peak else 0


def as_json(program: Program, target: Target, found: list[str]) -> dict[str, Any]:
    facts = program.to_json()
    kernels = facts.pop("kernels")
    return {
        "device": target.device.name, **facts, "kernels": len(kernels), "flops": program.flops,
        "bytes_moved": program.moved, "bytes_by_group": program.moved_by_group(),
        "roofline_seconds": roofline(program, target),
        "largest": [vars(k) for k in program.largest(TOP)], "warnings": found,
    }  # fmt: skip


def as_text(program: Program, target: Target, found: list[str]) -> str:
    lines = [_head(program, target), _matmuls(program), _attention(program), _precise(program),
             _memory(program, target), *_collectives(program), _state(program), _atomics(program),
             _moved(program, target), *_groups(program)]  # fmt: skip
    return "\n".join([*lines, *(f"warning: {line}" for line in found)])


def _head(program: Program, target: Target) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in program.versions.items())
    where = f"{program.how} {target.device.name} ({target.name}), which is not here"
    return f"{program.framework}: {where}; nothing was run. {versions}; {program.seconds:.1f} s"


def _matmuls(program: Program) -> str:
    counts: Counter[tuple[str, str]] = Counter()
    for m in program.matmuls:
        counts[m.units, m.phase] += m.times
    shares = []
    for units, share in program.share().items():
        each = ", ".join(f"{counts[units, p]} {p}" for p in PHASES if counts[units, p])
        shares.append(f"{units} {share:.1%} ({each or 'inside attention'})")
    return f"matmuls, by share of {program.flops / 1e12:.3g} TFLOP: {'; '.join(shares)}"


def _attention(program: Program) -> str:
    counts: Counter[tuple[str, str, str]] = Counter()
    for a in program.attention:
        counts[a.kernel, a.dtype, a.phase] += a.times
    kernels = ", ".join(f"{n} {p}" for (_, _, p), n in counts.items()) or "no fused kernel"
    names = " ".join(sorted({f"{kernel} in {dtype}:" for kernel, dtype, _ in counts}))
    return (
        f"attention: {names} {kernels}".replace("  ", " ")
        + f" (decided: {program.attention_asked})"
    )


def _precise(program: Program) -> str:
    if not program.operations:
        return "operations whose precision matters: none"
    by_dtype: dict[str, list[str]] = {}
    for operation in program.operations:
        by_dtype.setdefault(operation.dtype, []).append(f"{operation.name} {operation.times}")
    parts = [f"in {dtype}: {', '.join(names)}" for dtype, names in sorted(by_dtype.items())]
    return "operations whose precision matters, " + "; ".join(parts)


def _memory(program: Program, target: Target) -> str:
    found = {name: program.parts[name] for name in PARTS if program.parts.get(name)}
    parts = ", ".join(f"{name} {bytes_text(n)}" for name, n in found.items())
    return f"memory: peak {bytes_text(program.peak)} of {bytes_text(target.memory)}: {parts}"


def bytes_text(count: float) -> str:
    """Writes bytes in GB, or small numbers in MB."""
    return f"{count / GB:.2f} GB" if count >= GB / 10 else f"{count / 1e6:.2f} MB"


def _collectives(program: Program) -> Iterator[str]:
    """Writes a line for each kind, phase and group size of collectives."""
    if program.collectives:
        sent = sum(c.sent * c.times for c in program.collectives)
        yield f"collectives: {bytes_text(sent)} sent by each device, in rings"
    rows: dict[tuple[str, str, int], list[Collective]] = {}
    for c in program.collectives:
        rows.setdefault((c.kind, c.phase, c.devices), []).append(c)
    for (kind, phase, devices), each in sorted(rows.items()):
        count, size = sum(c.times for c in each), sum(c.bytes * c.times for c in each)
        hidden = sum(c.times for c in each if c.meanwhile)
        dtypes = " and ".join(sorted({d for c in each for d in c.dtype.split("+")}))
        yield (f"  {kind}, {phase}, {devices} devices: {count} of {bytes_text(size)} in {dtypes}; "
               f"{hidden} with other kernels beside them")  # fmt: skip


def _state(program: Program) -> str:
    kept = sum(b.donated for b in program.state)
    return f"state: {kept} of {len(program.state)} buffers donated, or updated in place"


def _atomics(program: Program) -> str:
    names = ", ".join(f"{name} {n}" for name, n in program.atomics.items())
    return f"atomic additions: {names or 'none'}"


def _moved(program: Program, target: Target) -> str:
    count = sum(kernel.times for kernel in program.kernels)
    text = f"moved: {bytes_text(program.moved)} by {count:,} kernels"
    times = roofline(program, target)
    if times is None:
        return text
    groups = ", ".join(f"{name} {value * 1e3:.3g}" for name, value in sorted(times.items()))
    total = f"{sum(times.values()) * 1e3:.3g} ms ({groups})"
    return f"{text}; roofline {total}: what no run is faster than, if each kernel runs as written"


def _groups(program: Program) -> Iterator[str]:
    groups = program.moved_by_group()
    yield "moved for " + ", ".join(f"{name} {bytes_text(groups[name])}" for name in GROUPS)
    yield "what moves most:"
    for k in program.largest(TOP):
        total, each = bytes_text(k.bytes * k.times), bytes_text(k.bytes)
        yield f"  {total} by {k.times} of {each}, {k.group}: {k.name}"
