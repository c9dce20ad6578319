"""Pictures of results."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from benchmarks.experiments.picture import Panel


def bars(rates: dict[str, float], path: Path) -> None:
    """Tokens/s by cell, the fastest on top."""
    names = sorted(rates, key=lambda name: rates[name])
    figure, axes = plt.subplots(figsize=(8, 1 + 0.3 * len(names)), layout="constrained")
    axes.barh(names, [rates[name] for name in names])
    axes.set_xlabel("tokens/s")
    figure.savefig(path, dpi=110)
    plt.close(figure)


Curve = tuple[Sequence[float], Sequence[float]]  # x, y


def laws(panels: dict[str, dict[str, Curve]], path: Path) -> None:
    """One panel a law: label -> (x, y)."""
    figure, axes = plt.subplots(
        1, len(panels), figsize=(4.5 * len(panels), 4), layout="constrained", squeeze=False
    )
    for axis, (title, lines) in zip(axes[0], panels.items()):
        for label, (x, y) in lines.items():
            order = np.argsort(x)
            axis.plot(np.array(x)[order], np.array(y)[order], "o-", label=label)
        axis.set_title(title)
        axis.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


FEW = 20  # points, which are drawn as such


def panels(shown: list[Panel], path: Path) -> None:
    """Side by side, two in a row."""
    rows = -(-len(shown) // 2)
    columns = min(2, len(shown))
    figure, axes = plt.subplots(
        rows, columns, figsize=(6.5 * columns, 4 * rows), layout="constrained", squeeze=False
    )
    for axis in axes.flat[len(shown) :]:
        axis.remove()
    for axis, panel in zip(axes.flat, shown):
        for label, (x, y) in panel.lines.items():
            dashes = "--" if label.startswith("torch") else "-"  # under jax's, where they agree
            axis.plot(x, y, dashes, marker="o" if len(x) <= FEW else "", label=label)
        for x, y in panel.marks.values():
            axis.plot(x, y, "rx")
        if panel.scale == "log":
            axis.loglog()
        elif panel.scale == "log2":
            axis.set_yscale("log", base=2)
        axis.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
        if panel.lines:
            axis.legend(fontsize="small")
    figure.savefig(path, dpi=110)
    plt.close(figure)
