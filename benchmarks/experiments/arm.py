"""One arm of an experiment: a framework under some flags, in a process of its own."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.cells import Cell, Flags
from benchmarks.measure import Result
from lockstep.config import Config
from lockstep.parity.side import ONE_THREAD

FRAMEWORKS = ("jax", "torch")
WINDOWS = 19  # timed ones in a run, and as many steps again to warm up as one of them has
# Two cores take some milliseconds for a step: 0.14 M parameters, bytes as tokens.
TOY: Flags = {"model": "tiny", "n_layer": 2, "n_head": 4, "d_model": 64, "context": 64,
              "batch_size": 8}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Arm:
    """`work` names a function of `benchmarks.experiments.work`; what it reports is the result.

    Without a schedule among the flags, the rate rises over a tenth of the steps to 2e-3 and falls
    to a tenth of that.
    """

    label: str
    framework: str
    steps: int = 0  # optimizer steps, 0 where nothing is trained
    flags: Flags = field(default_factory=dict)
    work: str = "train"
    device: str = "cpu"

    @property
    def name(self) -> str:
        return f"{self.framework} {self.label}"

    @property
    def environment(self) -> dict[str, str]:
        """Of its process. A toy is too small to share: on two threads torch waits more than it
        computes as soon as something else runs."""
        return ONE_THREAD if TOY.items() <= self.flags.items() else {}

    @property
    def cell(self) -> Cell:
        """The same steps as a cell of the grid, which is how they are timed."""
        each = max(1, self.steps // (WINDOWS + 1))
        windows = max(1, min(WINDOWS, (self.steps - 1) // each))
        schedule = {"lr": 2e-3, "warmup": self.steps // 10}
        return Cell(
            table="experiments", contender=self.framework, flags={**schedule, **self.flags},
            device=self.device, warmup=self.steps - windows * each, windows=windows, steps=each,
        )  # fmt: skip

    @property
    def config(self) -> Config:
        return self.cell.config


def both(label: str, **fields: Any) -> list[Arm]:
    """The same in both frameworks, next to each other: they are compared."""
    return [Arm(label=label, framework=framework, **fields) for framework in FRAMEWORKS]


class Arms:
    """The results of an experiment's arms, each a dict with its `label` and `framework`."""

    def __init__(self, results: Iterable[Result]) -> None:
        self.all = list(results)

    @property
    def good(self) -> list[Result]:
        """Of those that could run."""
        return [result for result in self.all if result["status"] == "ok"]

    def complete(self, *labels: str) -> dict[str, list[Result]]:
        """Framework -> the results of these arms, in this order, where all of them could run."""
        found = {(result["framework"], result["label"]): result for result in self.good}
        return {
            framework: [found[framework, label] for label in labels]
            for framework in FRAMEWORKS
            if all((framework, label) in found for label in labels)
        }

    def failures(self) -> list[str]:
        return [
            f"{result['framework']} {result['label']}: {result['status']} ({result['why']})"
            for result in self.all
            if result["status"] != "ok"
        ]


def sentence(parts: Iterable[str], arms: Arms) -> str:
    """The closing words: a part for each framework, and whatever could not run."""
    said = "; ".join([*parts, *(f"not measured: {failure}" for failure in arms.failures())])
    return f"{said[:1].upper()}{said[1:]}." if said else "Nothing was measured."


def memory(result: Result) -> int | None:
    """Bytes that training needs: the allocator's peak on CUDA; on a CPU, where the resident set
    holds what libraries keep for later too, the framework's account of a step, weights, moments."""
    if result["about"]["platform"] != "cpu":
        return result["peak_bytes"]
    needed = result["predicted_bytes"]
    return None if needed is None else needed + result["state_bytes"]


def milliseconds(result: Result) -> float:
    """Of a step, in the median window."""
    return 1e3 * result["tokens_per_step"] / result["tokens_per_second"]


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def failed(result: Result, head: list[str], told: int) -> list[str] | None:
    """The row of an arm that could not run, after its first cells; None if it could."""
    if result["status"] == "ok":
        return None
    return [f"{result['status']}: {result['why']}", *[""] * (len(head) - told - 1)]
