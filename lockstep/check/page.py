"""The report as one HTML file: no script, nothing loaded, both colour schemes."""

import base64
import hashlib
import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, NamedTuple

from lockstep.check import report
from lockstep.check.check import Result
from lockstep.check.locate import Root
from lockstep.check.rungs import Rung
from lockstep.parity.verdict import Finding, Outcome, Verdict

WIDTH, HEIGHT, MARGIN = 760, 190, 12  # of a picture, in pixels
LOWEST, HIGHEST = -17, 1  # powers of ten that a picture of gaps shows; zero is drawn at the lowest

STYLE = """
:root { color-scheme: light dark; --text: #1b1b1b; --back: #fff; --line: #d0d0d0; --good: #1a7f37;
  --bad: #c62828; --dim: #5f5f5f; --box: #f5f5f5; --a: #1565c0; --b: #b34700; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e6e6; --back: #16181b; --line: #444;
  --good: #57c26f; --bad: #ff7b72; --dim: #a6a6a6; --box: #22262b; --a: #79b8ff; --b: #ffab70; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--text); background: var(--back);
  max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.35rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem; }
.verdict { color: #fff; padding: .1rem .6rem; border-radius: .3rem; margin-right: .5rem; }
.verdict.equal { background: #1a7f37; } .verdict.different { background: #c62828; }
.verdict.incomplete { background: #8a5a00; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; padding: .2rem .6rem; border-bottom: 1px solid var(--line);
  vertical-align: top; } td { overflow-wrap: anywhere; }
td.figure { white-space: nowrap; font-variant-numeric: tabular-nums; }
code, pre { font: 13px ui-monospace, monospace; } pre { background: var(--box); padding: .6rem;
  white-space: pre-wrap; overflow-wrap: anywhere; }
.dim { color: var(--dim); } .bad { color: var(--bad); font-weight: 600; }
.good { color: var(--good); }
.root { background: var(--box); padding: .6rem 1rem; margin: .6rem 0;
  border-left: 4px solid var(--bad); } svg { width: 100%; height: auto; }
svg text { fill: var(--dim); font-size: 11px; } svg .a { fill: var(--a); } 
  svg .b { fill: var(--b); }
summary { cursor: pointer; font-size: 1.1rem; font-weight: 600; margin: 2rem 0 .4rem; }
:focus-visible { outline: 3px solid var(--a); outline-offset: 2px; }
"""
# The browser itself refuses whatever a page that was tampered with would run or load.
DIGEST = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
POLICY = f"default-src 'none'; base-uri 'none'; form-action 'none'; style-src 'sha256-{DIGEST}'"


def page(result: Result, command: str) -> str:
    """Names and messages come from the user's files: every one is escaped."""
    isolated = next(rung for rung in result.rungs if rung.number == "2i")
    curve = next(rung for rung in result.rungs if rung.number == "8")
    verdict, _, rest = report.headline(result).partition(": ")
    parts = [
        f"<h1><span class='verdict {result.verdict}'>{escape(verdict)}</span>{escape(rest)}</h1>",
        f"<pre>{escape(command)}</pre>",
        *[_root(number, root) for number, root in enumerate(result.roots, 1)],
        *[f"<p class=dim>accepted: {escape(root.name)}</p>" for root in result.accepted],
        "<h2>Rungs</h2>", _rungs(result.rungs),
        "<h2>Gaps of modules in the order of calls, isolated</h2>", _gaps(isolated),
        "<h2>Loss curves</h2>", _curves(curve),
        _folded(f"{len(result.pairs)} modules, isolated", _modules(isolated, result.pairs), True),
        _folded(f"Mapping of {len(result.mapping.entries)} tensors", _table(
            ("port", "reference", "axes"), (
                (str(e.port), str(e.reference), str(list(e.permutation)) if e.turned else "")
                for e in result.mapping.entries))),
        "<h2>Sides</h2>", _table(("", "reference", "port"), _sides(result)),
        *[f"<p class=dim>{escape(note)}</p>" for note in (*result.mapping.notes, *result.notes)],
    ]  # fmt: skip
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        f'<meta http-equiv=Content-Security-Policy content="{POLICY}">'
        '<meta name=viewport content="width=device-width">'
        f"<title>lockstep check: {escape(result.verdict)}</title><style>{STYLE}</style><main>\n"
        + "\n".join(parts)
        + "</main></html>\n"
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
    rows: list[list[str | Cell]] = []
    for rung in sorted(rungs, key=lambda rung: rung.number):
        worst, total = rung.worst, len(rung.findings)
        figures = [f"{worst.figure:.2g}", f"{worst.bound:.2g}", worst.where]
        if rung.lacks:
            said, mark, figures = f"not run: {rung.lacks}", "dim", ["", "", ""]
        elif rung.spots:
            said, mark = f"{len(rung.spots)} of {total} different", "bad"
        else:
            said, mark = f"{total} equal", "good"
        largest, bound, at = figures
        rows.append([rung.number, rung.name, Cell(said, mark), Cell(largest, "figure"),
                     Cell(bound, "figure"), at])  # fmt: skip
    return _table(("rung", "compares", "result", "largest", "bound", "at"), rows)


def _modules(isolated: Rung, pairs: dict[str, str]) -> str:
    """The reference's modules by their names, with the larger of their gaps."""
    rows = []
    for p, r in sorted(pairs.items(), key=lambda pair: pair[1]):
        worst = Outcome([found for found in isolated.findings if found.where == r]).worst
        rows.append((r, p, Cell(f"{worst.figure:.2g}", _colour(worst))))
    return _table(("reference", "port", "gap"), rows)


def _gaps(isolated: Rung) -> str:
    points = isolated.findings
    if not points:
        return "<p class=dim>no module was compared</p>"
    step = WIDTH / len(points)
    parts = []
    for power in range(LOWEST + 1, HIGHEST + 1, 4):
        parts += [_rule(10.0**power, "line"), _label(10.0**power, f"{10.0**power:.0e}")]
    for at, found in enumerate(points):
        parts.append(
            f"<circle cx={(at + 0.5) * step:.1f} cy={_height(found.figure):.1f} r=3 "
            f"fill=var(--{_colour(found)})><title>{escape(found.where)}: {found.figure:.2g}"
            "</title></circle>"
        )
    bound = points[0].bound
    parts += [_rule(bound, "dim"), f"<text x={WIDTH} y={_height(bound) - 4:.1f} text-anchor=end>"
              f"bound {bound:.1g}</text>"]  # fmt: skip
    return _picture(parts, f"{len(points)} gaps, on a logarithmic scale; the table of modules "
                    "has them as numbers")  # fmt: skip


def _colour(found: Finding) -> str:
    return "good" if found.verdict is Verdict.EQUAL else "bad"


def _rule(figure: float, colour: str) -> str:
    y = f"{_height(figure):.1f}"
    return f"<line x1=0 x2={WIDTH} y1={y} y2={y} stroke=var(--{colour}) />"


def _label(figure: float, text: str) -> str:
    return f"<text x=2 y={_height(figure) - 3:.1f}>{text}</text>"


def _height(figure: float) -> float:
    """Of a gap in its picture: what is no number stands at the top, and zero at the bottom."""
    log = math.log10(max(figure, 10.0**LOWEST)) if math.isfinite(figure) else HIGHEST
    return MARGIN + (HEIGHT - 2 * MARGIN) * (HIGHEST - min(log, HIGHEST)) / (HIGHEST - LOWEST)


def _curves(curve: Rung) -> str:
    if curve.lacks or not curve.kept:
        return f"<p class=dim>not run: {escape(curve.lacks)}</p>"
    ours, theirs = ([float(x) for x in each] for each in curve.kept)
    values = [x for x in (*ours, *theirs) if math.isfinite(x)] or [0.0]
    low, high = min(values), max(values)
    scale = (HEIGHT - 4 * MARGIN) / ((high - low) or 1.0)

    def line(losses: list[float], style: str) -> str:
        points = " ".join(
            f"{at * WIDTH / max(len(losses) - 1, 1):.1f},{HEIGHT - MARGIN - (x - low) * scale:.1f}"
            for at, x in enumerate(losses) if math.isfinite(x)
        )  # fmt: skip
        return f'<polyline points="{points}" fill=none {style} />'

    return _picture([
        line(theirs, "stroke=var(--a) stroke-width=4 stroke-opacity=0.5"),
        line(ours, 'stroke=var(--b) stroke-width=1.5 stroke-dasharray="6 4"'),
        f"<text x=2 y=12>{high:.4g}</text><text x=2 y={HEIGHT}>{low:.4g}</text>",
        f"<text x=70 y=12 class=a>reference, wide</text><text x=170 y=12 class=b>port, dashed"
        f"</text><text x={WIDTH} y=12 text-anchor=end>{len(ours)} steps</text>",
    ], f"losses of {len(ours)} steps, from {low:.4g} to {high:.4g}")  # fmt: skip


def _picture(parts: Iterable[str], label: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role=img aria-label="{label}">{"".join(parts)}</svg>'
    )


def _sides(result: Result) -> list[tuple[str, str, str]]:
    def words(value: Any) -> str:
        return (
            ", ".join(f"{k} {v}" for k, v in value.items()) if type(value) is dict else str(value)
        )

    names = ("framework", "versions", "device", "precision")
    return [(n, words(result.reference[n]), words(result.port[n])) for n in names]


def _folded(title: str, content: str, is_open: bool = False) -> str:
    """Opened by a click, or by the keyboard."""
    start = "<details open>" if is_open else "<details>"
    return f"{start}<summary>{escape(title)}</summary>{content}</details>"


class Cell(NamedTuple):
    text: str
    mark: str  # a class of the style


def _table(head: Sequence[str], rows: Iterable[Sequence[str | Cell]]) -> str:
    first = "".join(f"<th scope=col>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    return f"<div class=wide><table><tr>{first}</tr>{body}</table></div>"


def _cell(cell: str | Cell) -> str:
    if isinstance(cell, Cell):
        return f"<td class='{cell.mark}'>{escape(cell.text)}</td>"
    return f"<td>{escape(cell)}</td>"
