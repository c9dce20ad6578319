"""What the plan's tests share: settings, and the programs that the formulas are held to."""

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


def setting(**changed: Any) -> Setting:
    given: dict[str, Any] = {"framework": "torch", "ampere": True, "policy": "bf16",
                             "remat": "none", "rows": 8}  # fmt: skip
    return Setting(**given | changed)


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
