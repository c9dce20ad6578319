"""The report as one HTML file: no script, nothing loaded, both colour schemes."""

import math
from collections.abc import Iterable, Sequence
from html import escape

from lockstep.check import report
from lockstep.check.check import Result
from lockstep.check.locate import Root
from lockstep.check.rungs import Rung

WIDTH, HEIGHT = 760, 180  # of a picture, in pixels
SMALLEST = 1e-17  # what a gap of zero is drawn as

STYLE = """
:root { color-scheme: light dark; --text: #1b1b1b; --back: #fff; --line: #ccc; --good: #1a7f37;
  --bad: #c62828; --dim: #666; --box: #f5f5f5; --a: #1565c0; --b: #ef6c00; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e6e6; --back: #16181b; --line: #444;
  --good: #57c26f; --bad: #ff7b72; --dim: #9a9a9a; --box: #22262b; --a: #79b8ff; --b: #ffab70; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--text); background: var(--back);
  max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1.equal { color: var(--good); } h1.different { color: var(--bad); }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; padding: .2rem .6rem;
  border-bottom: 1px solid var(--line); vertical-align: top; }
code, pre { font: 13px ui-monospace, monospace; } pre { background: var(--box); padding: .6rem;
  overflow-x: auto; } .dim { color: var(--dim); } .bad { color: var(--bad); font-weight: 600; }
.good { color: var(--good); } .root { background: var(--box); padding: .6rem 1rem; margin: .6rem 0;
  border-left: 4px solid var(--bad); } svg { width: 100%; height: auto; }
svg text { fill: var(--dim); font-size: 11px; }
summary { cursor: pointer; font-weight: 600; margin: 1rem 0 .4rem; }
"""


def page(result: Result, command: str) -> str:
    """Names and messages come from the user's files: every one is escaped."""
    isolated = next(rung for rung in result.rungs if rung.number == "2i")
    curve = next(rung for rung in result.rungs if rung.number == "8")
    parts = [
        f"<h1 class={result.verdict}>{escape(result.verdict.upper())}</h1>",
        f"<p>{escape(report.headline(result))}</p><pre>{escape(command)}</pre>",
        *[_root(number, root) for number, root in enumerate(result.roots, 1)],
        *[f"<p class=dim>accepted: {escape(root.name)}</p>" for root in result.accepted],
        "<h2>Rungs</h2>", _rungs(result.rungs),
        "<h2>Gaps in the order of calls, isolated</h2>", _gaps(isolated),
        "<h2>Modules</h2>", _modules(isolated, result.pairs),
        "<h2>Loss curves</h2>", _curves(curve),
        f"<details><summary>Mapping of {len(result.mapping.entries)} pieces</summary>",
        _table(("port", "reference", "axes"), (
            (str(e.port), str(e.reference), str(list(e.permutation)) if e.turned else "")
            for e in result.mapping.entries
        )), "</details>",
        "<h2>Sides</h2>", _table(("", "reference", "port"), _sides(result)),
        *[f"<p class=dim>{escape(note)}</p>" for note in (*result.mapping.notes, *result.notes)],
    ]  # fmt: skip
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width">'
        f"<title>lockstep check: {escape(result.verdict)}</title><style>{STYLE}</style>"
        + "\n".join(parts)
        + "</html>\n"
    )


def _root(number: int, root: Root) -> str:
    lines = [
        f"<b>{number} {escape(root.where)}</b>, {root.direction}: {escape(report.figure(root))}"
    ]
    lines += [f"cause: {escape(root.cause)}"] * bool(root.cause)
    lines += [f"known: {escape(hint)}" for hint in root.hints]
    lines += [f"try: <code>{escape(root.remedy)}</code>"] * bool(root.remedy)
    return f"<div class=root>{'<br>'.join(lines)}</div>"


def _rungs(rungs: Sequence[Rung]) -> str:
    rows = []
    for rung in sorted(rungs, key=lambda rung: rung.number):
        if rung.lacks:
            said = f"not run: {rung.lacks}"
        else:
            said = f"{len(rung.spots)} of {rung.compared} different"
        rows.append((rung.number, rung.name, said, f"{rung.largest:.2g}", f"{rung.bound:.2g}",
                     rung.at))  # fmt: skip
    return _table(("rung", "", "", "largest", "bound", "where"), rows)


def _modules(isolated: Rung, pairs: dict[str, str]) -> str:
    """The reference's modules as a tree, by their names, with the larger of their gaps."""
    worst: dict[str, tuple[float, float]] = {}
    for _, where, figure, bound in isolated.figures:
        if figure >= worst.get(where, (-1.0, 0.0))[0]:
            worst[where] = figure, bound
    rows = []
    for r in sorted(pairs.values()):
        figure, bound = worst.get(r, (0.0, 1.0))
        mark = "bad" if not figure <= bound else "good"
        indent = 1.2 * r.count(".")
        rows.append(
            f"<tr><td style='padding-left:{indent:.1f}rem'>{escape(r)}</td>"
            f"<td class={mark}>{figure:.2g}</td></tr>"
        )
    return f"<table>{''.join(rows)}</table>"


def _gaps(isolated: Rung) -> str:
    points = [(figure, bound, where) for _, where, figure, bound in isolated.figures]
    if not points:
        return "<p class=dim>no module was compared</p>"
    step = WIDTH / len(points)
    dots = []
    for at, (figure, bound, where) in enumerate(points):
        colour = "good" if figure <= bound else "bad"
        dots.append(
            f"<circle cx={(at + 0.5) * step:.1f} cy={_height(figure):.1f} r=3 "
            f"fill=var(--{colour})><title>{escape(where)}: {figure:.2g}</title></circle>"
        )
    line = _height(points[0][1])
    dots.append(
        f"<line x1=0 x2={WIDTH} y1={line:.1f} y2={line:.1f} stroke=var(--dim) />"
        f"<text x=2 y={line - 4:.1f}>bound {points[0][1]:.1g}</text>"
    )
    return _picture(dots)


def _height(figure: float) -> float:
    """Of a gap, from 1e-17 below to 10 above."""
    log = math.log10(min(max(figure, SMALLEST), 10.0)) if figure == figure else 1.0
    return HEIGHT * (1 - log) / (1 - math.log10(SMALLEST))


def _curves(curve: Rung) -> str:
    if curve.lacks or not curve.kept:
        return f"<p class=dim>not run: {escape(curve.lacks)}</p>"
    ours, theirs = ([float(x) for x in each] for each in curve.kept)
    values = [x for x in (*ours, *theirs) if math.isfinite(x)] or [0.0]
    low, high = min(values), max(values)
    scale = (HEIGHT - 20) / ((high - low) or 1.0)

    def line(losses: list[float], colour: str, dash: str) -> str:
        points = " ".join(
            f"{at * WIDTH / max(len(losses) - 1, 1):.1f},{HEIGHT - 10 - (x - low) * scale:.1f}"
            for at, x in enumerate(losses) if math.isfinite(x)
        )  # fmt: skip
        return f'<polyline points="{points}" fill=none stroke=var(--{colour}) {dash} />'

    legend = f"<text x=2 y=12>{high:.4g}: reference solid, port dashed, {len(ours)} steps</text>"
    lines = [line(theirs, "a", ""), line(ours, "b", 'stroke-dasharray="6 4"'), legend]
    return _picture([*lines, f"<text x=2 y={HEIGHT - 2}>{low:.4g}</text>"])


def _picture(parts: Iterable[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role=img>{"".join(parts)}</svg>'


def _sides(result: Result) -> list[tuple[str, str, str]]:
    names = ("framework", "versions", "device", "precision")
    return [(n, str(result.reference[n]), str(result.port[n])) for n in names]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    first = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{first}</tr>{body}</table>"
