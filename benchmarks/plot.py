"""Pictures of results, where matplotlib is there: it is an extra, and without it none is drawn."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Curve = tuple[Sequence[float], Sequence[float]]  # x, y
FEW = 20  # points, which are drawn as such


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


def bars(rates: dict[str, float], path: Path) -> bool:
    """Tokens/s by cell, the fastest on top."""
    names = sorted(rates, key=lambda name: rates[name])

    def draw(axis: Any) -> None:
        axis.barh(names, [rates[name] for name in names])
        axis.set_xlabel("tokens/s")

    return _save(path, [draw], columns=1, size=(8, 1 + 0.3 * len(names)))


def laws(panels: dict[str, dict[str, Curve]], path: Path) -> bool:
    """One panel a law: label -> (x, y)."""
    shown = [Panel(title, "", "", lines) for title, lines in panels.items()]
    return _save(path, [_panel(each) for each in shown], columns=len(shown), size=(4.5, 4))


def panels(shown: list[Panel], path: Path) -> bool:
    """Side by side, two in a row."""
    return _save(path, [_panel(each) for each in shown], columns=min(2, len(shown)), size=(6.5, 4))


def _panel(panel: Panel) -> Callable[[Any], None]:
    def draw(axis: Any) -> None:
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

    return draw


def _save(path: Path, draws: list[Callable[[Any], None]], columns: int,
          size: tuple[float, float]) -> bool:  # fmt: skip
    """Each draws on axes of this size, in inches; False where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = -(-len(draws) // columns)
    whole = (size[0] * columns, size[1] * rows)
    figure, axes = plt.subplots(rows, columns, figsize=whole, layout="constrained", squeeze=False)
    for axis in axes.flat[len(draws) :]:
        axis.remove()
    for axis, draw in zip(axes.flat, draws):
        draw(axis)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True
