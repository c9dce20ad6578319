"""The report as one HTML file."""

from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from lockstep import chart, html
from lockstep.chart import Line
from lockstep.check import report
from lockstep.check.check import Result
from lockstep.check.roots.locate import Root
from lockstep.check.rungs import Stage
from lockstep.html import Cell, folded, table
from lockstep.judge.verdict import Finding, Outcome, Verdict

STYLE = """
.verdict { color: #fff; padding: .1rem .6rem; border-radius: .3rem; margin-right: .5rem; }
.verdict.equal { background: #1a7f37; } .verdict.different { background: #c62828; }
.verdict.incomplete { background: #8a5a00; }
.root, .root code { white-space: pre-wrap; }
.beside { background: var(--box); padding: .6rem 1rem; margin: .6rem 0;
  border-left: 4px solid var(--bad); }
.beside { border-left-color: var(--line); }
"""


def page(result: Result, command: str) -> str:
    """Names and messages come from the user's files: every one is escaped."""
    isolated = next(rung for rung in result.rungs if rung.number == "2i")
    curve = next(rung for rung in result.rungs if rung.number == "8")
    verdict, _, rest = report.headline(result).partition(": ")
    parts = [
        f"<h1><span class='verdict {result.verdict}'>{escape(verdict)}</span>{escape(rest)}</h1>",
        f"<pre>{escape(command)}</pre>",
        *[_root(number, root) for number, root in enumerate(result.roots, 1)],
        *[_root("", root, "beside") for root in (*result.beside, *result.initial)],
        *[f"<p class=dim>accepted: {escape(root.name)}</p>" for root in result.accepted],
        "<h2>Rungs</h2>", _rungs(result.rungs),
        _curves(curve),
        folded(f"{len(result.pairs)} modules, isolated", _modules(isolated, result.pairs), True),
        folded(f"Mapping of {len(result.mapping.entries)} tensors", table(
            ("port", "reference", "axes"), (
                (str(e.port), str(e.reference), str(list(e.permutation)) if e.turned else "")
                for e in result.mapping.entries))),
        "<h2>Sides</h2>", table(("", "reference", "port"), _sides(result)),
        *[f"<p class=dim>{escape(note)}</p>" for note in (*result.mapping.notes, *result.notes)],
        *[f"<p class=dim>{escape(line)}</p>" for line in report.rest(result)],
    ]  # fmt: skip
    return html.document(f"lockstep check: {result.verdict}", parts, STYLE)


def _root(number: int | str, root: Root, kind: str = "root") -> str:
    place = f"{number} {root.where}".strip()
    lines = [f"<b>{escape(place)}</b>, {root.direction}: {escape(report.figure(root))}"]
    for word, said in report.details(root):
        in_code = word in ("reference", "port", "try")
        lines.append(
            f"{word}: <code>{escape(said)}</code>" if in_code else escape(f"{word}: {said}")
        )
    return f"<div class='{kind}'>{'<br>'.join(lines)}</div>"


def _rungs(rungs: Sequence[Stage]) -> str:
    rows: list[list[str | Cell]] = []
    for rung in sorted(rungs, key=lambda rung: rung.number):
        worst, mark = rung.worst, "bad" if rung.spots else "good"
        figures = f"{worst.figure:.2g}", f"{worst.bound:.2g}", worst.where
        if rung.lacks:
            mark, figures = "dim", ("", "", "")
        largest, bound, at = figures
        rows.append([rung.number, rung.name, Cell(report.outcome(rung), mark),
                     Cell(largest, "figure"), Cell(bound, "figure"), at])  # fmt: skip
    return table(("rung", "compares", "result", "largest", "bound", "at"), rows)


def _modules(isolated: Stage, pairs: dict[str, str]) -> str:
    """Lists the reference's modules by their names, with the larger of their gaps."""
    rows = []
    for p, r in sorted(pairs.items(), key=lambda pair: pair[1]):
        worst = Outcome([found for found in isolated.findings if found.where == r]).worst
        rows.append((r, p, Cell(f"{worst.figure:.2g}", _colour(worst))))
    return table(("reference", "port", "gap"), rows)


def _colour(found: Finding) -> str:
    return "good" if found.verdict is Verdict.EQUAL else "bad"


def _curves(curve: Stage) -> str:
    if curve.lacks or not curve.kept:
        return f"<h2>Loss curves</h2><p class=dim>not run: {escape(curve.lacks)}</p>"
    ours, theirs = (np.asarray(each, np.float64) for each in curve.kept)
    lines = [
        Line(name, np.arange(1, len(losses) + 1), losses)
        for name, losses in (("reference", theirs), ("port", ours))
    ]
    return f"<h2>Loss curves</h2>{chart.list_numbers(lines)}"


def _sides(result: Result) -> list[tuple[str, str, str]]:
    def words(value: Any) -> str:
        return (
            ", ".join(f"{k} {v}" for k, v in value.items()) if type(value) is dict else str(value)
        )

    names = ("framework", "versions", "device", "precision")
    return [(n, words(result.reference[n]), words(result.port[n])) for n in names]
