"""What an experiment draws, as data; matplotlib is an extra."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

Curve = tuple[Sequence[float], Sequence[float]]  # x, y


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


def draw(panels: list[Panel], path: Path) -> bool:
    """False where matplotlib is missing."""
    try:
        from benchmarks import plot
    except ImportError:
        return False
    plot.panels(panels, path)
    return True
