"""Programs that XLA compiled, or torch traced, for devices that are not here, beside the plan's
formulas: the rows of `benchmarks/results/compiled-*.jsonl` and `inductor.jsonl`."""

import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from benchmarks.cells import PLAIN
from benchmarks.tables import markdown
from lockstep import devices, results, twin
from lockstep.config import from_flags
from lockstep.config.mesh import Mesh
from lockstep.plan import memory, roofline, shape
from lockstep.plan.recommend import REMAT
from lockstep.plan.setting import Setting, counts_as_ampere
from lockstep.process import ROOT

LEAST = 200e6  # bytes of state and step, from which a program's error counts
# Of a device's memory: XLA recomputes by its own choice in a program that takes more.
FITS = 0.8

Figures = dict[str, Any]


@dataclass(frozen=True)
class Known:
    """A program that XLA compiled, or torch traced, for a device that is not here."""

    name: str
    shape: shape.Shape
    setting: Setting
    device: devices.Device
    mesh: Mesh
    row: Figures

    @property
    def group(self) -> str:
        return self.setting.group(self.shape)

    @property
    def memory_error(self) -> float:
        """The plan's bytes, relative to the program's."""
        planned: float = memory.parts(self.shape, self.setting, self.mesh).total
        return planned / self.row["peak"] - 1

    @property
    def seconds_error(self) -> float:
        """The plan's roofline, relative to the program's."""
        found: float = sum(self.row["roofline"].values())
        return roofline.bound(self.shape, self.setting, self.device) / found - 1

    @property
    def moved_error(self) -> float:
        """The plan's bytes outside of matmuls and attention, relative to the program's."""
        parts = self.row["moved"].items()
        found = sum(n for name, n in parts if name not in ("matmuls", "attention"))
        return roofline.moved(self.shape, self.setting) / found - 1

    @property
    def counts(self) -> bool:
        fits = self.row["peak"] <= FITS * self.device.memory
        return self.row["peak"] >= LEAST and (fits or self.setting.framework == "torch")


def programs() -> Iterator[Known]:
    """The committed rows of both frameworks, of one device."""
    for framework in twin.MODULES:
        for name, row in rows_of(framework).items():
            if "peak" in row:
                yield _known(framework, name, row, row["cell"], row["measured"]["device"])


def on_meshes(framework: str) -> Iterator[Known]:
    """The committed rows of a framework, of one of several devices."""
    for name, row in rows_of("mesh").items():
        if name.split()[0] == framework:
            yield _known(framework, name, row, row["cell"], row["measured"]["device"])


def by_inductor() -> Iterator[Known]:
    """The committed rows of PyTorch's programs that Inductor wrote for absent devices."""
    for name, row in results.read(ROOT / "benchmarks" / "results" / "inductor.jsonl").items():
        flags = row["flags"] | {"compile": True}
        figures = row["compiled"] | {"roofline": {"all": row["compiled"]["roofline"]}}
        yield _known("torch", name, figures, flags, row["device"])


def rows_of(file: str) -> dict[str, results.Row]:
    """Reads the rows of jax, torch or mesh."""
    return results.read(ROOT / "benchmarks" / "results" / f"compiled-{file}.jsonl")


def _known(framework: str, name: str, row: Figures, flags: Figures, gpu: str) -> Known:
    device, config = devices.find(gpu), from_flags({**PLAIN, **flags, "steps": 1}, accelerator=True)
    given = Setting(
        framework=framework, ampere=counts_as_ampere(device), policy=flags["policy"],
        remat=flags["remat"], rows=flags["batch_size"], accum=config.optim.accum,
        loss_chunks=config.execution.loss_chunks, compiled=config.execution.compile,
        timed=int(row.get("library", 0)) > 0,  # cuBLAS's matmuls are then what it would choose
        scanned=framework == "jax" and config.execution.layers == "scan",
    )  # fmt: skip
    return Known(name, shape.of_model(config.model), given, device, config.mesh, row)


def groups() -> dict[str, list[Known]]:
    """The programs that count, by the group that shares its constants."""
    found: dict[str, list[Known]] = defaultdict(list)
    for known in programs():
        if known.counts:
            found[known.group].append(known)
    return dict(found)


def table() -> str:
    """Writes the plan's errors of each group's peak and roofline."""
    ends = ("lowest", "median", "highest")
    heads = ["group", "programs", *(f"memory: {e}" if e == "lowest" else e for e in ends),
             *(f"seconds: {e}" if e == "lowest" else e for e in ends)]  # fmt: skip
    lines = []
    for group, found in groups().items():
        errors = [known.memory_error for known in found], [known.seconds_error for known in found]
        cells = [f"{f(e):+.1%}" for e in errors for f in (min, statistics.median, max)]
        lines.append([group, str(len(found)), *cells])
    return markdown(heads, lines)


def table_of_meshes() -> str:
    """Writes the plan's errors of the peak of one of several devices."""
    lines = []
    for framework, remat in product(twin.MODULES, REMAT):
        errors = [k.memory_error for k in on_meshes(framework) if k.setting.remat == remat]
        if not errors:
            continue
        cells = [f"{f(errors):+.1%}" for f in (min, statistics.median, max)]
        lines.append([framework, remat, str(len(errors)), *cells])
    return markdown(["framework", "remat", "programs", "lowest", "median", "highest"], lines)
