"""Runs side by side, as one HTML file."""

from collections.abc import Sequence
from html import escape

import numpy as np

from lockstep import chart, html
from lockstep.chart import Line, shorten
from lockstep.html import Cell, folded, table
from lockstep.monitor import norms
from lockstep.monitor.gaps import Gap
from lockstep.monitor.history import History, differences

# Column -> heading, unit, whether the scale is logarithmic.
CHARTS = {
    "loss": ("Training loss", "nats a token", False),
    "val_loss": ("Validation loss", "nats a token", False),
    "grad_norm": ("Gradient norm before clipping", "", True),
    "loss_scale": ("Loss scale", "", True),
    "lr": ("Learning rate", "", False),
    "tokens_per_second": ("Throughput", "tokens/s", False),
    "mfu": ("Model FLOPs utilization", "of the devices' peak", False),
    "peak_bytes": ("Peak memory", "bytes", False),
}
SKIPS = 20  # steps that are listed


def page(histories: Sequence[History], gaps: Sequence[Gap]) -> str:
    """Makes the page; names, settings and samples are untrusted, so every text is escaped."""
    count = f"{len(histories)} run{'s' * (len(histories) > 1)}"
    differing = differences(histories)
    parts = [
        f"<h1>{count}</h1>", _summary(histories),
        "<h2>Differences of the configurations</h2>",
        table(["setting", *(run.name for run in histories)], [[n, *row] for n, row in differing])
        if differing else "<p class=dim>none</p>",
        _chart("loss", histories), _chart("val_loss", histories),
        *map(_gap, gaps),
        *[_chart(name, histories) for name in list(CHARTS)[2:]],
        *(drawn for run in histories for drawn in norms.charts(run)),
        *(folded(f"Sample of {run.name}", f"<pre>{escape(run.sample)}</pre>", True)
          for run in histories if run.sample),
    ]  # fmt: skip
    return html.document(f"lockstep report: {count}", filter(None, parts))


def _summary(histories: Sequence[History]) -> str:
    head = ("run", "framework", "model", "policy", "steps", "last loss", "best validation loss",
            "skipped", "median tokens/s", "peak memory")  # fmt: skip
    return table(head, map(_row, histories))


def _row(run: History) -> list[str | Cell]:
    config, columns = run.config, run.columns
    rates, peaks, losses = (columns[c] for c in ("tokens_per_second", "peak_bytes", "loss"))
    best = min(filter(np.isfinite, run.evaluations.values()), default=np.nan)
    done = int(run.steps[-1]) if len(run.steps) else 0
    figures = [
        f"{done:,} of {config.optim.steps:,}",
        f"{losses[-1]:.4f}" if len(losses) else "",
        f"{best:.4f}",
        f"{int(np.nansum(columns['skipped'])):,}",
        shorten(float(np.median(rates[np.isfinite(rates)]))) if np.isfinite(rates).any() else "",
        shorten(float(np.nanmax(peaks))) if np.isfinite(peaks).any() else "",
    ]
    names = [run.name, run.record.framework, config.model.model, config.precision.policy]
    return [*names, *(Cell(figure, "figure") for figure in figures)]


def _chart(column: str, histories: Sequence[History]) -> str:
    title, unit, log = CHARTS[column]
    if column == "val_loss":
        lines = [
            Line(run.name, *map(np.array, zip(*sorted(run.evaluations.items()))))
            for run in histories
            if run.evaluations
        ]
        return chart.draw(title, lines, unit=unit)
    lines = [Line(run.name, run.steps, run.columns[column]) for run in histories]
    if column != "loss_scale":
        return chart.draw(title, lines, unit=unit, log=log)
    if all((line.y == 1).all() for line in lines):  # no run has one
        return ""
    skips = [(run.name, run.steps[run.columns["skipped"] > 0]) for run in histories]
    marks = sorted({int(step) for _, steps in skips for step in steps})
    said = [f"<p>{escape(name)} skipped {_count(steps)}</p>" for name, steps in skips if len(steps)]
    return chart.draw(title, lines, unit=unit, log=log, marks=marks) + "".join(said)


def _count(steps: np.ndarray) -> str:
    more = ", ..." if len(steps) > SKIPS else ""
    return f"{len(steps):,} steps: {', '.join(map(str, steps[:SKIPS]))}{more}"


def _gap(gap: Gap) -> str:
    known = {"gap": gap.gap, "noise envelope": gap.envelope, "called different": gap.allowed}
    lines = [Line(name, gap.steps, y) for name, y in known.items() if y is not None]
    drawn = chart.draw(f"Gap of the losses: {gap.title}", lines, unit="nats", log=True)
    if not gap.gap.any():
        return f"<h2>Gap of the losses: {escape(gap.title)}</h2><p>equal bit for bit</p>"
    return f"{drawn}<p>{escape(gap.verdict)}</p>"
