"""One arm of an experiment: a framework under some flags, in a process of its own."""

from dataclasses import dataclass, field
from typing import Any

from benchmarks.cells import Cell, Flags
from lockstep.config import Config

FRAMEWORKS = ("jax", "torch")
SEEDS = 5  # of an arm that is run again
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
    def runs(self) -> int:
        return SEEDS if self.work.startswith("seeds") else 1

    @property
    def name(self) -> str:
        return f"{self.framework} {self.label}"

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
