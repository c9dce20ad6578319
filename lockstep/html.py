"""A self-contained HTML page: no script, nothing loaded, light and dark, readable by keyboard.

Every text is escaped here; what is marked `Markup` was made here or by who calls.
"""

import base64
import hashlib
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

STYLE = """
:root { color-scheme: light dark; --text: light-dark(#1b1b1b, #e6e6e6);
  --back: light-dark(#fff, #16181b); --line: light-dark(#d0d0d0, #444);
  --good: light-dark(#1a7f37, #57c26f); --bad: light-dark(#c62828, #ff7b72);
  --dim: light-dark(#5f5f5f, #a6a6a6); --box: light-dark(#f5f5f5, #22262b);
  --a: light-dark(#1565c0, #79b8ff); }
:root:has(#light:checked) { color-scheme: light; }
:root:has(#dark:checked) { color-scheme: dark; }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--text); background: var(--back);
  max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.35rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem; }
fieldset { float: right; border: 0; margin: 0; padding: 0; font-size: 13px; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; padding: .2rem .6rem; border-bottom: 1px solid var(--line);
  vertical-align: top; } td { overflow-wrap: anywhere; }
td.figure { white-space: nowrap; font-variant-numeric: tabular-nums; }
code, pre { font: 13px ui-monospace, monospace; } pre { background: var(--box); padding: .6rem;
  white-space: pre-wrap; overflow-wrap: anywhere; }
.dim { color: var(--dim); } .bad { color: var(--bad); font-weight: 600; }
.good { color: var(--good); }
img { width: 100%; background: #fff; }
summary { cursor: pointer; font-size: 1.1rem; font-weight: 600; margin: 2rem 0 .4rem; }
:focus-visible { outline: 3px solid var(--a); outline-offset: 2px; }
"""
SWITCH = "<fieldset><legend class=dim>colours</legend>" + "".join(
    f"<label><input type=radio name=scheme id={name}{' checked' * (name == 'system')}> "
    f"{name}</label> "
    for name in ("system", "light", "dark")
)  + "</fieldset>"  # fmt: skip


class Cell(NamedTuple):
    text: str
    mark: str  # a class of the style


def document(title: str, parts: Iterable[str], style: str = "") -> str:
    """Makes the whole page; `parts` are markup, `style` is added to STYLE."""
    style = STYLE + style
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        f'<meta http-equiv=Content-Security-Policy content="{policy(style)}">'
        '<meta name=viewport content="width=device-width">'
        f"<title>{escape(title)}</title><style>{style}</style>{SWITCH}<main>\n"
        + "\n".join(parts)
        + "</main></html>\n"
    )


def policy(style: str) -> str:
    """Makes the policy by which a browser refuses to run or load anything."""
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return (
        "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; "
        f"style-src 'sha256-{digest}'"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str | Cell]]) -> str:
    first = "".join(f"<th scope=col>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    return f"<div class=wide><table><tr>{first}</tr>{body}</table></div>"


def _cell(cell: str | Cell) -> str:
    if isinstance(cell, Cell):
        return f"<td class='{cell.mark}'>{escape(cell.text)}</td>"
    return f"<td>{escape(cell)}</td>"


def folded(title: str, content: str, is_open: bool = False) -> str:
    """Makes markup that a click or a key opens."""
    start = "<details open>" if is_open else "<details>"
    return f"{start}<summary>{escape(title)}</summary>{content}</details>"
