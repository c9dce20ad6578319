"""Charts of a run's gradient norms: by kind of module, and by layer."""

import math
import re

import numpy as np

from lockstep import chart
from lockstep.chart import Line
from lockstep.monitor.history import History

LAYER = re.compile(r"blocks\.([0-9]{1,6})\.(.+)")
LINES = 12  # of a chart; more could not be told from each other
Squares = dict[str, dict[int, float]]  # by line and step


def charts(run: History) -> list[str]:
    """Draw the norms of a run with `--norms`.

    The norm of several modules is that of their gradients together, so that each chart's lines make
    up the whole norm.
    """
    kinds, layers = Squares(), Squares()
    for module, norms in run.norms.items():
        match = LAYER.fullmatch(module)
        _add(kinds, match[2] if match else module, norms)
        if match:
            _add(layers, f"layer {int(match[1])}", norms)
    return [_draw(f"Gradient norm by kind of module: {run.name}", kinds),
            _draw(f"Gradient norm by layer: {run.name}", layers)]  # fmt: skip


def _add(squares: Squares, name: str, norms: dict[int, float]) -> None:
    of_name = squares.setdefault(name, {})
    for step, norm in norms.items():
        of_name[step] = of_name.get(step, 0.0) + norm * norm


def _draw(title: str, squares: Squares) -> str:
    names = list(squares)
    chosen = np.unique(np.linspace(0, max(len(names) - 1, 0), LINES).round().astype(int))
    lines = []
    for name in [names[i] for i in chosen] if names else []:
        steps = sorted(squares[name])
        norms = [math.sqrt(squares[name][step]) for step in steps]
        lines.append(Line(name, np.array(steps, np.int64), np.array(norms)))
    return chart.draw(title, lines, log=True)
