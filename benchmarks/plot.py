"""Pictures of results, where matplotlib is there: it is an extra, and without it none is drawn."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Curve = tuple[Sequence[float], Sequence[float]]  # x, y
FEW = 20  # points, which are drawn as such
STEP, NATS = "optimizer step", "nats a token"  # axes


class Panel(NamedTuple):
    title: str
    x: str
    y: str
    lines: Mapping[str, Curve]
    marks: Mapping[str, Curve] = {}  # red crosses
    scale: str = "linear"  # of y; "log" draws x so, too; "log2" is for loss scales


def steps(values: Sequence[float]) -> Curve:
    """A value for each optimizer step, from 1."""
    return range(1, len(values) + 1), values


def panels(shown: list[Panel], path: Path) -> bool:
    """Draws panels side by side, two in a row.

    Returns:
        Whether there is a picture: False where matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns, rows = min(2, len(shown)), -(-len(shown) // 2)
    size = (6.5 * columns, 4 * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for axis, panel in zip(axes.flat, shown):
        _draw(axis, panel)
    for axis in axes.flat[len(shown) :]:
        axis.remove()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True


def _draw(axis: Any, panel: Panel) -> None:
    for label, curve in panel.lines.items():
        x, y = zip(*sorted(zip(*curve))) if len(curve[0]) else curve
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
