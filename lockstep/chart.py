"""Lines over steps, drawn by matplotlib (the extra `plot`), each with its numbers as a table."""

import base64
import io
import warnings
from collections.abc import Sequence
from html import escape
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np

from lockstep.html import Cell, folded, table

SIZE = (8, 2.8)  # inches
LARGEST = 1e100  # what is beyond is left out: the span of two such numbers would overflow
ROWS = 12  # of the table
FEW = 50  # points of a line that are marked one by one
# A line is told from another by its dashes too, not by its colour alone.
DASHES = ("-", "--", ":", "-.")
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "lockstep"}  # text stays text, of any script


class Line(NamedTuple):
    name: str
    x: np.ndarray  # steps, rising
    y: np.ndarray  # float64; what is not finite is left out


def import_pyplot() -> Any:
    """Import matplotlib's pyplot with a backend that only writes files.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def draw(
    title: str,
    lines: Sequence[Line],
    *,
    unit: str = "",
    log: bool = False,
    marks: Sequence[int] = (),
) -> str:
    """Draw a section of a page: heading, picture and table; "" where no line has a number.

    Args:
        log: a logarithmic scale, on which zero and what is below stands at the bottom.
        marks: steps to point at.
    """
    lines = [line._replace(y=np.where(np.abs(line.y) < LARGEST, line.y, np.nan)) for line in lines]
    if not any(np.isfinite(line.y).any() for line in lines):
        return ""
    heading = f"{title}, {unit}" if unit else title
    picture = base64.b64encode(_draw_svg(lines, log, marks).encode()).decode()
    words = escape(f"{heading}: {'; '.join(map(_describe, lines))}")
    return (
        f"<section><h2>{escape(heading)}</h2>"
        f'<img alt="{words}" src="data:image/svg+xml;base64,{picture}">'
        f"{folded(f'{title}: table', list_numbers(lines))}</section>"
    )


def _draw_svg(lines: Sequence[Line], log: bool, marks: Sequence[int]) -> str:
    plt = import_pyplot()
    with plt.rc_context(STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a letter that its font lacks is drawn by the browser's
        figure, axes = plt.subplots(figsize=SIZE, layout="constrained")
        for line, dashes in zip(lines, cycle(DASHES)):
            marker = "." if len(line.x) <= FEW else ""
            axes.plot(line.x, line.y, dashes, marker=marker, label=line.name)
        if log:
            axes.set_yscale("log", nonpositive="clip")
        bottom = [0.02] * len(marks)
        axes.plot(marks, bottom, "r^", transform=axes.get_xaxis_transform(), label="_marks")
        axes.grid(alpha=0.3)
        handles, names = axes.get_legend_handles_labels()
        legend = figure.legend(handles, names, loc="outside upper left", ncols=4)
        for text in legend.get_texts():
            text.set_parse_math(False)  # a name with "$" in it is no formula
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
        plt.close(figure)
    return drawn.getvalue()


def shorten(value: float) -> str:
    """Shorten a number: 12.3k, 4M, 1e-09, 0.25."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size <= abs(value) < 1e15:
            return f"{value / size:.4g}{letter}"
    return f"{value:.3g}"


def _describe(line: Line) -> str:
    """Describe a picture in words, for a reader who does not see it."""
    found = np.flatnonzero(np.isfinite(line.y))
    if not len(found):
        return f"{line.name}: no numbers"
    first, last = found[0], found[-1]
    lowest, highest = (found[pick(line.y[found])] for pick in (np.argmin, np.argmax))
    said = [f"{shorten(line.y[i])} at step {line.x[i]:.0f}" for i in (first, last, lowest, highest)]
    return f"{line.name} from {said[0]} to {said[1]}, lowest {said[2]}, highest {said[3]}"


def list_numbers(lines: Sequence[Line]) -> str:
    """Make a table of the lines' numbers at some of their steps."""
    steps = np.unique(np.concatenate([line.x for line in lines]))
    chosen = steps[np.unique(np.linspace(0, len(steps) - 1, ROWS).round().astype(int))]
    known = [dict(zip(line.x.tolist(), line.y.tolist())) for line in lines]
    rows = [
        [Cell(f"{step:.0f}", "figure"),
         *(Cell(f"{each[step]:.6g}" if step in each else "", "figure") for each in known)]
        for step in chosen.tolist()
    ]  # fmt: skip
    return table(["step", *(line.name for line in lines)], rows)
