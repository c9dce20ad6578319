"""Programs that XLA compiled, or torch traced, for devices that are not here, beside the plan's
formulas: the rows of `benchmarks/results/compiled-*.jsonl`."""

import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lockstep import devices, results, twin
from lockstep.config import from_flags
from lockstep.plan import memory, roofline, shape
from lockstep.plan.setting import Setting, counts_as_ampere
from lockstep.process import ROOT

LEAST = 200e6  # bytes of state and step, from which a program's error counts
# Of a device's memory: XLA recomputes by its own choice in a program that takes more.
FITS = 0.8


@dataclass(frozen=True)
class Known:
    """A program that XLA compiled, or torch traced, for a device that is not here."""

    name: str
    shape: shape.Shape
    setting: Setting
    device: devices.Device
    row: dict[str, Any]  # its figures

    @property
    def group(self) -> str:
        return self.setting.group(self.shape)

    @property
    def memory_error(self) -> float:
        """The plan's bytes, relative to the program's."""
        state = memory.state_bytes(self.shape, self.setting.roles)
        planned: float = state + memory.step_bytes(self.shape, self.setting)
        return planned / self.row["peak"] - 1

    @property
    def seconds_error(self) -> float:
        """The plan's roofline, relative to the program's."""
        found: float = sum(self.row["roofline"].values())
        return roofline.bound(self.shape, self.setting, self.device) / found - 1

    @property
    def counts(self) -> bool:
        fits = self.row["peak"] <= FITS * self.device.memory
        return self.row["peak"] >= LEAST and (fits or self.setting.framework == "torch")


def programs() -> Iterator[Known]:
    """The committed rows of both frameworks."""
    for framework in twin.MODULES:
        rows = results.read(ROOT / "benchmarks" / "results" / f"compiled-{framework}.jsonl")
        for name, row in rows.items():
            if "peak" in row:
                device, cell = devices.find(row["measured"]["device"]), row["cell"]
                config = from_flags({**cell, "steps": 1}, accelerator=True)
                given = Setting(
                    framework=framework, ampere=counts_as_ampere(device), policy=cell["policy"],
                    remat=cell["remat"], rows=cell["batch_size"], accum=cell["accum"],
                    loss_chunks=config.execution.loss_chunks,
                )  # fmt: skip
                yield Known(name, shape.of_model(config.model), given, device, row)


def groups() -> dict[str, list[Known]]:
    """The programs that count, by the group that shares its constants."""
    found: dict[str, list[Known]] = defaultdict(list)
    for known in programs():
        if known.counts:
            found[known.group].append(known)
    return dict(found)


def table() -> str:
    """How far the plan is off each group's peak and roofline."""
    ends = ("lowest", "median", "highest")
    heads = ["group", "programs", *(f"memory: {e}" if e == "lowest" else e for e in ends),
             *(f"seconds: {e}" if e == "lowest" else e for e in ends)]  # fmt: skip
    lines = [heads, ["---"] * len(heads)]
    for group, found in groups().items():
        errors = [known.memory_error for known in found], [known.seconds_error for known in found]
        cells = [f"{f(e):+.1%}" for e in errors for f in (min, statistics.median, max)]
        lines.append([group, str(len(found)), *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
