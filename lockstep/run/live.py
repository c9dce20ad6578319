"""The live view of a run in a terminal: progress, a sparkline of the loss, and the last numbers."""

import math
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from lockstep.chart import short

RAMP, PLAIN_RAMP = "▁▂▃▄▅▆▇█", "_.-=+*#@"  # for terminals that have no other letters than ASCII
COLUMNS = 60
REFRESH = 2  # times a second, whatever the steps are


class Curve:
    """The losses of a run in at most 2 * COLUMNS means, each of equally many steps."""

    def __init__(self) -> None:
        self.means: list[float] = []
        self.stride, self.open = 1, list[float]()

    def add(self, loss: float) -> None:
        if not math.isfinite(loss):
            return
        self.open.append(loss)
        if len(self.open) < self.stride:
            return
        self.means.append(sum(self.open) / self.stride)
        self.open = []
        if len(self.means) == 2 * COLUMNS:
            pairs = zip(self.means[::2], self.means[1::2])
            self.means, self.stride = [(a + b) / 2 for a, b in pairs], 2 * self.stride

    def draw(self, ramp: str = RAMP) -> str:
        means = self.means[-COLUMNS:]
        if not means:
            return ""
        low, high = min(means), max(means)
        step = (high - low) / (len(ramp) - 1) or 1.0
        return "".join(ramp[round((mean - low) / step)] for mean in means)


class View:
    """What is drawn; `note` takes each row of the log."""

    def __init__(self, progress: Progress) -> None:
        self.progress, self.curve = progress, Curve()
        self.row: dict[str, Any] = {}
        self.evaluated: dict[str, float] = {}
        self.skips, self.spike = 0, ""

    def note(self, row: dict[str, Any]) -> None:
        if row["kind"] == "train":
            self.row = row
            self.curve.add(row["loss"])
            self.skips += row["skipped"]
        elif row["kind"] == "eval":
            self.evaluated = {k: v for k, v in row.items() if k.startswith("val_loss")}
        elif row["kind"] == "spike":
            self.spike = f"step {row['spike']}, by the batch of step {row['batch']}"

    def numbers(self) -> list[tuple[str, str]]:
        row = self.row
        if not row:
            return []
        found = [
            ("loss", f"{row['loss']:.4f}"),
            *((name.replace("_", " "), f"{loss:.4f}") for name, loss in self.evaluated.items()),
            ("grad norm", f"{row['grad_norm']:.3f}"), ("learning rate", f"{row['lr']:.2e}"),
            ("loss scale", f"{row['loss_scale']:g}, {self.skips} steps skipped"),
            ("tokens/s", short(row["tokens_per_second"])),
            ("peak memory", f"{short(row['peak_bytes'])}B"),
        ]  # fmt: skip
        found += [("MFU", f"{row['mfu']:.1%}")] if row["mfu"] else []
        return [*found, ("last spike", self.spike)] if self.spike else found

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table.grid(padding=(0, 2))
        for name, value in self.numbers():
            table.add_row(Text(name, "dim"), Text(value))
        ramp = PLAIN_RAMP if options.ascii_only else RAMP
        yield Group(self.progress, Text(self.curve.draw(ramp), "cyan"), table)
