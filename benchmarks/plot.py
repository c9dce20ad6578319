"""Pictures of results."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np


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
