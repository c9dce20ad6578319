"""Narrow formats: the loss of each after five seeds' runs, beside fp32's from the same seeds.

In JAX; the ladder shows that PyTorch's program is the same. Its fp32 alone is run too, as a
yardstick: so far two programs part that differ in their rounding and in nothing else.
"""

from collections.abc import Iterable

import numpy as np

from benchmarks.cells import Flags
from benchmarks.experiments.frame import TOY, Arm, Experiment, both, is_good
from benchmarks.measure import Result
from benchmarks.tables import markdown

SEEDS = 5
SINGLE = "fp32"
FORMATS = ("bf16", "fp8", "fp8-delayed", "fp8-rowwise", "mxfp8", "nvfp4", "nvfp4, to nearest")
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


def arms(scale: str, device: str) -> list[Arm]:
    listed = []
    for model, (length, flags) in MODELS[scale].items():
        for label in (SINGLE, *FORMATS):
            policy, _, nearest = label.partition(", ")
            work = "seeds to nearest" if nearest else "seeds"
            each = both(f"{model}: {label}", steps=length, flags={**flags, "policy": policy},
                        device=device, work=work)  # fmt: skip
            listed += [arm for arm in each if arm.framework == "jax" or label == SINGLE]
    return listed


def deviation(losses: np.ndarray) -> float:
    return float(np.std(losses, ddof=1))


def find_single(results: list[Result], result: Result) -> Result | None:
    """JAX's result under fp32, of the same model."""
    label = f"{result['label'].partition(': ')[0]}: {SINGLE}"
    found = [r for r in results if r["framework"] == "jax" and r["label"] == label and is_good(r)]
    return found[0] if found and found[0] is not result else None


class Formats(Experiment):
    """The table has a deviation and a margin over seeds, beside JAX's fp32 of the same model."""

    def table(self, results: Iterable[Result]) -> str:
        found, rows = list(results), []
        for result in found:
            model, _, label = result["label"].partition(": ")
            row, single = [model, label, result["framework"]], find_single(found, result)
            if not is_good(result):
                rows.append([*row, f"{result['status']}: {result['why']}", "", "", "", ""])
                continue
            losses = np.array(result["validation_losses"])
            row += [f"{losses.mean():.4f}", f"{deviation(losses):.4f}"]
            if single is None:
                rows.append([*row, "", "", ""])
                continue
            off, spread = losses - single["validation_losses"], single["validation_losses"]
            margin = T99 * deviation(off) / SEEDS**0.5
            share = off.mean() / deviation(spread)
            rows.append([*row, f"{off.mean():+.4f}", f"{margin:.4f}", f"{share:+.2f}"])
        return markdown(HEAD, rows)


EXPERIMENT = Formats(what="loss against format, over five seeds", arms=arms, columns={})
