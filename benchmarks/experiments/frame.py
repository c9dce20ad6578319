"""The frame of an experiment: arms that are run, and columns of a table.

An arm is a framework under some flags. Each is a job, and a row.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.cells import Flags
from benchmarks.jobs import Job
from benchmarks.measure import Result
from benchmarks.tables import markdown
from lockstep.config import Config, from_flags
from lockstep.process import ONE_THREAD

FRAMEWORKS = ("jax", "torch")
# On two threads torch waits more than it computes as soon as something else runs: a smoke test
# stays off that.
SCALES: dict[str, dict[str, str]] = {"smoke": ONE_THREAD, "full": {}}
# Two cores take some milliseconds for a step: 0.14 M parameters, bytes as tokens.
TOY: Flags = {"model": "tiny", "n_layer": 2, "n_head": 4, "d_model": 64, "context": 64,
              "batch_size": 8}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A framework under some flags; `work` names one of `benchmarks.experiments.work.WORKS`.

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
    def config(self) -> Config:
        schedule = {"lr": 2e-3, "warmup": self.steps // 10}
        flags = {**schedule, **self.flags, "steps": self.steps, "device": self.device}
        return from_flags(flags, accelerator=self.device != "cpu")


def both(label: str, **fields: Any) -> list[Arm]:
    """One arm in both frameworks, next to each other: they are compared."""
    return [Arm(label=label, framework=framework, **fields) for framework in FRAMEWORKS]


Text = Callable[[Result], str]  # of a cell, from an arm's result


@dataclass(frozen=True, kw_only=True)
class Experiment:
    what: str
    arms: Callable[[str, str], list[Arm]]  # of a scale and a device
    columns: dict[str, Text]  # by head, behind the label and the framework
    label: str = "arm"  # the head of the labels
    apart: str = ""  # the label of arms that have no row, but the table that `more` makes
    more: Callable[[list[Result]], str] = lambda results: ""

    def table(self, results: Iterable[Result]) -> str:
        found = list(results)
        rows = []
        for result in found:
            if result["label"] == self.apart:
                continue
            texts = [text(result) for text in self.columns.values()] if is_good(result) else [
                f"{result['status']}: {result['why']}", *[""] * (len(self.columns) - 1)
            ]  # fmt: skip
            rows.append([result["label"], result["framework"], *texts])
        head = [self.label, "framework", *self.columns]
        more = self.more([r for r in found if r["label"] == self.apart and is_good(r)])
        return "\n\n".join(filter(None, [markdown(head, rows), more]))


def jobs(name: str, experiment: Experiment, scale: str, device: str) -> list[Job]:
    return [
        Job(
            name=f"{name} {scale} {arm.framework} {arm.label}",
            work="benchmarks.experiments.work:perform", given=asdict(arm), device=device,
            changes=SCALES[scale],
        )
        for arm in experiment.arms(scale, device)
    ]  # fmt: skip


def is_good(result: Result) -> bool:
    return result["status"] == "ok"
