"""fp32, bf16 and fp16: time, memory and loss."""

from benchmarks.experiments.frame import (
    LOSS,
    MEMORY,
    TOY,
    Arm,
    Experiment,
    both,
    milliseconds,
    named,
    ratio,
)
from benchmarks.measure import Result
from benchmarks.plot import NATS, STEP, Panel, steps

POLICIES = ("fp32", "bf16", "fp16")


def arms(scale: str, device: str) -> list[Arm]:
    length, model = (1_000, {}) if scale == "full" else (400, TOY)
    return [
        arm
        for policy in POLICIES
        for arm in both(policy, steps=length, flags={**model, "policy": policy}, device=device)
    ]


def off(result: Result, base: Result | None) -> str:
    """The validation loss, relative to fp32's."""
    return f"{result['validation_loss'] / base['validation_loss'] - 1:+.2%}" if base else ""


def panels(results: list[Result]) -> list[Panel]:
    found = named(results)
    gaps = {
        name: steps([a - b for a, b in zip(each["losses"], single["losses"])])
        for name, each in found.items()
        if (single := found.get(f"{each['framework']} fp32")) and each is not single
    }
    losses = {name: steps(each["losses"]) for name, each in found.items()}
    return [Panel("loss", STEP, NATS, losses), Panel("loss less that under fp32", STEP, NATS, gaps)]


EXPERIMENT = Experiment(
    what="fp32, bf16 and fp16: time, memory and loss", arms=arms, panels=panels, label="policy",
    base="fp32",
    columns={
        "ms/step": lambda result, _: f"{milliseconds(result):.4g}",
        "time over fp32's": ratio(milliseconds),
        **MEMORY,
        "validation loss, nats": LOSS,
        "over fp32's loss": off,
        "steps skipped": lambda r, _: str(r["skipped"]) if r["label"] == "fp16" else "",
        "lowest scale": lambda r, _: f"{min(r['loss_scales']):g}" if r["label"] == "fp16" else "",
    },
)  # fmt: skip
