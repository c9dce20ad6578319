"""fp32, bf16 and fp16: time, memory and loss."""

from benchmarks.experiments.arm import TOY, Arm, both
from benchmarks.experiments.outcome import (
    Arms,
    closing,
    failure_row,
    mebibytes,
    memory,
    milliseconds,
    share,
)
from benchmarks.plot import Panel, steps
from benchmarks.tables import markdown

WHAT = "fp32, bf16 and fp16: time, memory and loss"
POLICIES = ("fp32", "bf16", "fp16")
HEAD = ["policy", "framework", "ms/step", "time over fp32's", "memory, MiB", "peak, MiB",
        "validation loss, nats", "over fp32's loss", "steps skipped", "lowest scale"]  # fmt: skip


def arms(scale: str, device: str) -> list[Arm]:
    length, model = (1_000, {}) if scale == "full" else (400, TOY)
    return [
        arm
        for policy in POLICIES
        for arm in both(policy, steps=length, flags={**model, "policy": policy}, device=device)
    ]


def table(arms: Arms) -> str:
    rows = []
    for result in arms.all:
        row = [result["label"], result["framework"]]
        if why := failure_row(result, HEAD, len(row)):
            rows.append(row + why)
            continue
        (single,) = arms.complete("fp32").get(result["framework"], [None])
        scaled = result["label"] == "fp16"
        rows.append([
            *row, f"{milliseconds(result):.4g}",
            f"{milliseconds(result) / milliseconds(single):.2f}" if single else "",
            mebibytes(memory(result)), mebibytes(result["peak_bytes"]),
            f"{result['validation_loss']:.4f}",
            f"{off(result, single):+.2%}" if single else "",
            str(result["skipped"]) if scaled else "",
            f"{min(result['loss_scales']):g}" if scaled else "",
        ])  # fmt: skip
    return markdown(HEAD, rows)


def off(result: dict, single: dict) -> float:
    """The validation loss, relative to fp32's."""
    return result["validation_loss"] / single["validation_loss"] - 1


def sentence(arms: Arms) -> str:
    parts = []
    for framework, (single, *halves) in arms.complete(*POLICIES).items():
        said = [
            f"{half['label']} took {milliseconds(half) / milliseconds(single):.2f} of fp32's time "
            f"and {share(half, single)} of its memory and ended {off(half, single):+.2%} off its "
            "validation loss"
            for half in halves
        ]
        parts.append(f"in {framework} {' and '.join(said)}")
    return closing(parts, arms)


def panels(arms: Arms) -> list[Panel]:
    curves = {f"{r['framework']} {r['label']}": steps(r["losses"]) for r in arms.good}
    gaps = {
        f"{framework} {label}": steps([a - b for a, b in zip(half["losses"], single["losses"])])
        for label in POLICIES[1:]
        for framework, (single, half) in arms.complete("fp32", label).items()
    }
    step, nats = "optimizer step", "nats a token"
    return [Panel("loss", step, nats, curves), Panel("loss less that under fp32", step, nats, gaps)]
