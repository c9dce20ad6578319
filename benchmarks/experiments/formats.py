"""Narrow formats: the loss of each after five seeds' runs, beside what a seed does to fp32's."""

import numpy as np

from benchmarks.experiments.arm import TOY, Arm, both
from benchmarks.experiments.outcome import Arms, closing, failure_row, markdown
from benchmarks.measure import Result
from benchmarks.plot import Panel, steps

WHAT = "loss against format, over five seeds"
FORMATS = ("bf16", "fp8", "fp8-delayed", "mxfp8", "nvfp4")
HEAD = ["policy", "framework", "validation loss, nats", "standard deviation over seeds",
        "over fp32's, same seed", "of fp32's deviation"]  # fmt: skip


def arms(scale: str, device: str) -> list[Arm]:
    length, model = (300, {}) if scale == "full" else (200, {**TOY, "n_layer": 3})
    return [
        arm
        for policy in ("fp32", *FORMATS)
        for arm in both(policy, steps=length, flags={**model, "policy": policy}, device=device,
                        work="seeds")
    ]  # fmt: skip


def table(arms: Arms) -> str:
    rows = []
    for result in arms.all:
        row = [result["label"], result["framework"]]
        if why := failure_row(result, HEAD, len(row)):
            rows.append(row + why)
            continue
        losses = result["validation_losses"]
        row += [f"{np.mean(losses):.4f}", f"{np.std(losses, ddof=1):.4f}"]
        (single,) = arms.complete("fp32").get(result["framework"], [None])
        if single is None or result is single:
            rows.append([*row, "", ""])
        else:
            gap, share = off(result, single)
            rows.append([*row, f"{gap:+.5f}", f"{share:+.2f}"])
    return markdown(HEAD, rows)


def off(result: Result, single: Result) -> tuple[float, float]:
    """The mean distance to fp32's loss from the same seed, in nats; and in standard deviations of
    fp32's own over the seeds."""
    ours, theirs = (np.array(each["validation_losses"]) for each in (result, single))
    gap = float(np.mean(ours - theirs))
    return gap, gap / float(np.std(theirs, ddof=1))


def sentence(arms: Arms) -> str:
    parts = []
    for framework, (single, *others) in arms.complete("fp32", *FORMATS).items():
        gaps = {other["label"]: off(other, single) for other in others}
        said = ", ".join(f"{label} {gap:+.4f} nats ({share:+.2f})"
                         for label, (gap, share) in gaps.items())  # fmt: skip
        parts.append(f"in {framework} the loss ended off that of fp32 from the same seed, and in "
                     f"standard deviations of fp32's over seeds, by {said}")  # fmt: skip
    return closing(parts, arms)


def panels(arms: Arms) -> list[Panel]:
    curves = {f"{r['framework']} {r['label']}": steps(r["losses"]) for r in arms.good}
    gaps = {
        f"{framework} {label}": steps([a - b for a, b in zip(own["losses"], single["losses"])])
        for label in FORMATS
        for framework, (single, own) in arms.complete("fp32", label).items()
    }
    step, nats = "optimizer step", "nats a token"
    return [Panel("loss", step, nats, curves), Panel("loss less that under fp32", step, nats, gaps)]
