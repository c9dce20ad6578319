"""Narrow formats: the loss of each after five seeds' runs, beside fp32's from the same seeds.

In JAX; the ladder shows that PyTorch's program is the same. Its fp32 alone is run too, as a
yardstick: so far two programs part that differ in their rounding and in nothing else.
"""

from typing import NamedTuple

import numpy as np

from benchmarks.cells import Flags
from benchmarks.experiments.arm import SEEDS, TOY, Arm, both
from benchmarks.experiments.outcome import Arms, closing, failure_row
from benchmarks.measure import Result
from benchmarks.plot import Panel, steps
from benchmarks.tables import markdown

WHAT = "loss against format, over five seeds"
SINGLE, HALF, NEAREST = "fp32", "bf16", "nvfp4, to nearest"
FRAMEWORK = "jax"
FORMATS = (HALF, "fp8", "fp8-delayed", "fp8-rowwise", "mxfp8", "nvfp4", NEAREST)
MODELS: dict[str, dict[str, tuple[int, Flags]]] = {  # scale -> model -> steps, flags
    "smoke": {"toy": (200, {**TOY, "n_layer": 3})},
    "full": {
        "tiny": (300, {"model": "tiny", "batch_size": 4}),
        "10m": (40, {"model": "10m", "batch_size": 4, "context": 64}),
    },
}
T99 = 4.604  # Student's t, four degrees of freedom, 1 % on both sides: there are 14 gaps
HEAD = ["model", "policy", "framework", "validation loss, nats", "standard deviation over seeds",
        "less fp32's, same seed", "± (99 %)", "of fp32's deviation"]  # fmt: skip


class Gap(NamedTuple):
    """Of the losses of two arms, seed by seed; in nats."""

    mean: float
    margin: float  # half the 99 % confidence interval

    @property
    def seen(self) -> bool:
        return abs(self.mean) > self.margin

    def __str__(self) -> str:
        return f"{self.mean:+.4f} ± {self.margin:.4f} nats"


def gap(one: Result, other: Result) -> Gap:
    off = np.subtract(one["validation_losses"], other["validation_losses"])
    return Gap(float(off.mean()), T99 * deviation(off) / SEEDS**0.5)


def deviation(losses: np.ndarray) -> float:
    return float(np.std(losses, ddof=1))


def arms(scale: str, device: str) -> list[Arm]:
    listed = []
    for model, (length, flags) in MODELS[scale].items():
        for label in (SINGLE, *FORMATS):
            policy, _, nearest = label.partition(", ")
            work = "seeds to nearest" if nearest else "seeds"
            each = both(f"{model}: {label}", steps=length, flags={**flags, "policy": policy},
                        device=device, work=work)  # fmt: skip
            listed += [arm for arm in each if arm.framework == FRAMEWORK or label == SINGLE]
    return listed


def by_model(arms: Arms) -> dict[str, dict[str, Result]]:
    """Model -> policy -> JAX's result, where that of fp32 is there."""
    found: dict[str, dict[str, Result]] = {}
    for result in arms.good:
        model, _, label = result["label"].partition(": ")
        if result["framework"] == FRAMEWORK:
            found.setdefault(model, {})[label] = result
    return {model: each for model, each in found.items() if SINGLE in each}


def table(arms: Arms) -> str:
    rows, singles = [], {model: each[SINGLE] for model, each in by_model(arms).items()}
    for result in arms.all:
        model, _, label = result["label"].partition(": ")
        row = [model, label, result["framework"]]
        if why := failure_row(result, HEAD, len(row)):
            rows.append(row + why)
            continue
        losses, single = result["validation_losses"], singles.get(model)
        row += [f"{np.mean(losses):.4f}", f"{deviation(losses):.4f}"]
        if single is None or result is single:
            rows.append([*row, "", "", ""])
        else:
            off = gap(result, single)
            share = off.mean / deviation(single["validation_losses"])
            rows.append([*row, f"{off.mean:+.4f}", f"{off.margin:.4f}", f"{share:+.2f}"])
    return markdown(HEAD, rows)


def sentence(arms: Arms) -> str:
    """Which formats' losses are told from fp32's, seed by seed."""
    parts = []
    for model, found in by_model(arms).items():
        single = found[SINGLE]
        gaps = {label: gap(found[label], single) for label in FORMATS if label in found}
        told, alike = (
            ", ".join(f"{label} ({off})" for label, off in gaps.items() if off.seen is seen)
            for seen in (True, False)
        )
        parts.append(
            f"after {single['steps']} steps of {model} the loss is told from fp32's, seed by seed, "
            f"under {told or 'no format'}, and is not under {alike or 'any'}, where fp32's own "
            f"standard deviation over seeds is {deviation(single['validation_losses']):.4f} nats"
        )
    return closing(parts, arms)


def panels(arms: Arms) -> list[Panel]:
    shown, what = [], "loss less that under fp32, one seed"
    for model, found in by_model(arms).items():
        gaps = {
            label: steps(np.subtract(each["losses"], found[SINGLE]["losses"]).tolist())
            for label, each in found.items()
            if label != SINGLE
        }
        shown.append(Panel(f"{model}: {what}", "optimizer step", "nats a token", gaps))
    return shown or [Panel(what, "optimizer step", "nats a token", {})]
