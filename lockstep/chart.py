"""Lines over steps as SVG, each chart with a legend and the same numbers as a table.

A line is told from another by its dashes too, not by its colour alone.
"""

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from lockstep.html import Cell, folded, picture, table

WIDTH, HEIGHT = 760, 240  # pixels, of which the margins hold the labels
LEFT, RIGHT, TOP, BOTTOM = 64, 8, 10, 24
COLUMNS = 400  # of a longer line, the lowest and the highest number of each column are drawn
LARGEST = 1e100  # what is beyond is left out: the span of two such numbers would overflow
ROWS = 12  # of the table
MARKS = 200
DASHES = ("", "7 4", "2 3", "10 3 2 3")
COLOURS = (
    ("#1565c0", "#79b8ff"), ("#b34700", "#ffab70"), ("#2e7d32", "#7fd78a"),
    ("#8e24aa", "#d7a1f0"), ("#b0003a", "#ff8fab"), ("#5d6d00", "#d4e157"),
)  # fmt: skip
STYLE = (
    "figure { margin: .4rem 0; } figcaption { display: flex; flex-wrap: wrap; gap: 0 1.2rem; }\n"
)
STYLE += "figcaption svg { width: 2rem; height: .7rem; }\n"
STYLE += "\n".join(
    f".line{i} {{ stroke: light-dark({light}, {dark}); fill: light-dark({light}, {dark}); }}"
    for i, (light, dark) in enumerate(COLOURS)
)
STYLE += "\npolyline[class] { fill: none; }\n"


class Line(NamedTuple):
    name: str
    x: np.ndarray  # steps, rising
    y: np.ndarray  # float64; what is not finite is left out


def draw(
    title: str, lines: Sequence[Line], *, unit: str = "", log: bool = False,
    marks: Sequence[tuple[int, str]] = (),
) -> str:  # fmt: skip
    """A section: heading, legend, picture and table; "" where no line has a number.

    Args:
        log: a logarithmic scale, on which zero and what is below stands at the bottom.
        marks: steps to point at, each with what to say of it; the first of them.
    """
    lines = [line._replace(y=np.where(np.abs(line.y) < LARGEST, line.y, np.nan)) for line in lines]
    numbers = [line.y[np.isfinite(line.y)] for line in lines]
    if not any(map(len, numbers)):
        return ""
    scale = Scale(np.concatenate(numbers), [line.x for line in lines], log)
    parts = [
        *scale.grid(),
        *(part for i, line in enumerate(lines) for part in _line(i, line, scale)),
    ]
    for step, what in marks[:MARKS]:
        parts.append(f'<path d="M{scale.x(step):.1f} {HEIGHT - BOTTOM} l-4 8 h8 z" '
                     f"fill=var(--bad)><title>{escape(what)}</title></path>")  # fmt: skip
    unit = f", {unit}" * bool(unit)
    words = "; ".join([*map(_in_words, lines), *(what for _, what in marks[:3])])
    legend = "".join(f"<span>{_stroke(i)} {escape(x.name)}</span>" for i, x in enumerate(lines))
    content = f"<figcaption>{legend}</figcaption>" + picture(
        parts, f"{title}{unit}: {words}", WIDTH, HEIGHT
    )
    return (
        f"<section><h2>{escape(title + unit)}</h2><figure>{content}</figure>"
        f"{folded(f'{title}: table', _numbers(lines))}</section>"
    )


class Scale:
    """From steps and numbers to pixels."""

    def __init__(self, numbers: np.ndarray, steps: Sequence[np.ndarray], log: bool) -> None:
        self.log, self.floor = log, float(min(numbers[numbers > 0], default=1.0))
        ends = [float(x[i]) for x in steps if len(x) for i in (0, -1)]
        self.first, self.last = min(ends), max(ends)
        self.low, self.high = (self.level(float(each)) for each in (min(numbers), max(numbers)))
        if self.high - self.low <= 1e-12 * abs(self.high):  # a constant is a line in the middle
            around = 1.0 if log else max(abs(self.high) / 10, 1e-300)
            self.low, self.high = self.low - around, self.high + around

    def level(self, y: float) -> float:
        return math.log10(max(y, self.floor)) if self.log else y

    def x(self, step: float) -> float:
        span = (self.last - self.first) or 1.0
        return LEFT + (WIDTH - LEFT - RIGHT) * (step - self.first) / span

    def y(self, number: float) -> float:
        share = (self.level(number) - self.low) / (self.high - self.low)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share

    def grid(self) -> Iterator[str]:
        for level in ticks(self.low, self.high):
            value = 10**level if self.log else level
            y = f"{self.y(value):.1f}"
            yield f"<line x1={LEFT} x2={WIDTH - RIGHT} y1={y} y2={y} stroke=var(--line) />"
            yield f'<text x={LEFT - 6} y={y} dy=".3em" text-anchor=end>{short(value)}</text>'
        for step in ticks(self.first, self.last):
            yield (
                f"<text x={self.x(step):.1f} y={HEIGHT - 4} text-anchor=middle>{short(step)}</text>"
            )


def ticks(low: float, high: float) -> list[float]:
    """Four to nine round numbers within a range."""
    if not high > low:
        return [low]
    step = 10.0 ** math.floor(math.log10((high - low) / 4))
    step *= next(n for n in (5, 2, 1) if (high - low) / (n * step) >= 3.99)
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def short(value: float) -> str:
    """12.3k, 4M, 1e-09, 0.25."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size <= abs(value) < 1e15:
            return f"{value / size:.4g}{letter}"
    return f"{value:.3g}"


def _line(number: int, line: Line, scale: Scale) -> Iterator[str]:
    x, y = thin(line.x, line.y)
    finite = np.isfinite(y)
    for part in np.split(np.arange(len(y)), np.flatnonzero(np.diff(finite)) + 1):
        if not len(part) or not finite[part[0]]:
            continue
        points = [f"{scale.x(x[i]):.1f},{scale.y(y[i]):.1f}" for i in part]
        if len(points) == 1:
            left, top = points[0].split(",")
            yield f"<circle cx={left} cy={top} r=3 class=line{number % len(COLOURS)} />"
        else:
            yield f'<polyline points="{" ".join(points)}" {_look(number)} />'


def _look(number: int) -> str:
    """Colour and dashes, together different for the first dozen lines."""
    dash = DASHES[(number + number // len(COLOURS)) % len(DASHES)]
    return f'class=line{number % len(COLOURS)} stroke-width=1.5 stroke-dasharray="{dash}"'


def _stroke(number: int) -> str:
    line = f'<polyline points="0,6 40,6" {_look(number)} />'
    return f'<svg viewBox="0 0 40 12" aria-hidden=true>{line}</svg>'


def thin(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Few enough points to draw, with every peak of a column."""
    if len(x) <= 2 * COLUMNS:
        return x, y
    kept = {0, len(x) - 1}
    for part in np.array_split(np.arange(len(x)), COLUMNS):
        finite = part[np.isfinite(y[part])]
        of_column = (
            (finite[y[finite].argmin()], finite[y[finite].argmax()]) if len(finite) else part
        )
        kept |= {int(of_column[0]), int(of_column[-1])}
    chosen = np.array(sorted(kept))
    return x[chosen], y[chosen]


def _in_words(line: Line) -> str:
    """What a reader who does not see the picture would ask first."""
    found = np.flatnonzero(np.isfinite(line.y))
    if not len(found):
        return f"{line.name}: no numbers"
    first, last = found[0], found[-1]
    lowest, highest = (found[pick(line.y[found])] for pick in (np.argmin, np.argmax))
    said = [f"{short(line.y[i])} at step {line.x[i]:.0f}" for i in (first, last, lowest, highest)]
    return f"{line.name} from {said[0]} to {said[1]}, lowest {said[2]}, highest {said[3]}"


def _numbers(lines: Sequence[Line]) -> str:
    steps = np.unique(np.concatenate([line.x for line in lines]))
    chosen = steps[np.unique(np.linspace(0, len(steps) - 1, ROWS).round().astype(int))]
    known = [dict(zip(line.x.tolist(), line.y.tolist())) for line in lines]
    rows = [
        [Cell(f"{step:.0f}", "figure"),
         *(Cell(f"{each[step]:.6g}" if step in each else "", "figure") for each in known)]
        for step in chosen.tolist()
    ]  # fmt: skip
    return table(["step", *(line.name for line in lines)], rows)
