"""docs/learn.md is the one source: of the notebook, and of what is run for the page's figures.

    python -m evidence learn [CELL ...]      # runs the cells here; minutes
    python -m evidence tables                # writes what they printed, and the notebook

A fence with a name is a cell: ```sh NAME [status=1] [tag=TAG] [show=REGEX] [OLD={NEW} ...]. The
page shows it as it stands, and behind it, as `<!-- table learn_NAME -->`, the lines of its output
that match. In the notebook each line is a `!` line, OLD is replaced by the variable NEW, and

    <!-- notebook ... -->          is there, and hidden in the page
    <!-- page --> ... <!-- end --> is in the page alone, as are the tables
"""

import json
import re
import shlex
import tempfile
from pathlib import Path
from typing import Any

import jupytext

from benchmarks.process import say
from evidence import notebook as notebooks
from lockstep import results
from lockstep.errors import require
from lockstep.process import ROOT
from lockstep.results import Row

PAGE, NOTEBOOK = ROOT / "docs" / "learn.md", ROOT / "docs" / "learn.ipynb"
RESULT = ROOT / "docs" / "results" / "learn.jsonl"
CELL = re.compile(r"^```(sh|python) (\w+)(.*)\n((?:.*\n)*?)```\n", re.M)
TABLE = re.compile(r"<!-- table \w+ -->\n.*?<!-- end -->\n", re.S)
ALONE = re.compile(r"<!-- page -->\n.*?<!-- end -->\n", re.S)
HIDDEN = re.compile(r"<!-- notebook\n(.*?)-->\n", re.S)
UNNAMED = re.compile(r"^```(sh|python)$", re.M)  # prose: jupytext's word for that is .noeval
KEPT = ("status", "tags")  # of a cell's metadata
PICTURE = re.compile(r"!\[.*\]\(learn-(\w+)\.png\)")  # of runs/NAME
PLATFORM = {
    "accelerator": "GPU",
    "colab": {"gpuType": "T4", "provenance": []},
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def notebook(page: str) -> Any:
    """The notebook of the page: nbformat 4.5, without outputs, the same bytes each time."""
    hidden = HIDDEN.sub(r"\1", ALONE.sub("", TABLE.sub("", page)))
    names = [cell[2] for cell in CELL.finditer(hidden)]
    made = jupytext.reads(UNNAMED.sub(r"\g<0> .noeval", CELL.sub(_fence, hidden)), fmt="md")
    made.metadata = PLATFORM
    made.nbformat, made.nbformat_minor = 4, 5
    codes = iter(names)
    for number, cell in enumerate(made.cells):
        cell.id = next(codes) if cell.cell_type == "code" else f"text-{number}"
        cell.source = cell.source.replace(" .noeval\n", "\n").rstrip("\n")
        cell.metadata = {name: cell.metadata[name] for name in KEPT if name in cell.metadata}
    return made


def _fence(cell: re.Match[str]) -> str:
    """A cell of the page as one of jupytext's Markdown."""
    language, name, _, source = cell.groups()
    given = options(cell)
    metadata = f" status={given.pop('status')}" if "status" in given else ""
    metadata += f' tags=["{given.pop("tag")}"]' if "tag" in given else ""
    given.pop("show", None)
    for old, new in given.items():
        assert old in source, f"{name}: there is no {old} to replace"
        source = source.replace(old, new)
    if language == "sh":
        source = re.sub("^", "!", source.rstrip("\n"), flags=re.M) + "\n"
    return f"```python {metadata.strip()}\n{source}```\n"


def options(cell: re.Match[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in shlex.split(cell[3]))


def code_cells() -> list[str]:
    """The names of the page's cells, less the one that installs."""
    page = PAGE.read_text(encoding="utf-8")
    return [cell[2] for cell in CELL.finditer(page) if "tag=setup" not in cell[3]]


def text(made: Any) -> str:
    """Of the notebook's file."""
    return jupytext.writes(made, fmt="ipynb")


def table(name: str, rows: dict[str, Row], page: str) -> str:
    """What a cell printed, of what the page shows; of `minutes`, how long all cells took."""
    if name == "minutes":
        minutes = sum(row["measured"]["seconds"] for row in rows.values()) / 60
        cores = {row["measured"]["cpu"]["cores"] for row in rows.values()}
        return f"All but section 7 computes for {minutes:.0f} minutes on {max(cores)} CPU cores."
    if name not in rows:
        return f"Not run yet. `python -m evidence learn {name}` does it."
    (show,) = (options(cell).get("show", "") for cell in CELL.finditer(page) if cell[2] == name)
    lines = [line for line in rows[name]["output"].splitlines() if re.search(show, line)]
    return "\n".join(["```text", *lines, "```", "", f"*{rows[name]['measured']['seconds']:.0f} s*"])


def measure(names: list[str]) -> None:
    """Runs the notebook's cells here, all or those named, and keeps what they printed."""
    page = PAGE.read_text(encoding="utf-8")
    made, order = notebook(page), code_cells()
    for name in names:
        require(name in order, "CELL", name, f"unknown; use {', '.join(order)}")
    if names:
        made.cells = [
            cell for cell in made.cells
            if cell.id in names or "parameters" in cell.metadata.get("tags", [])
        ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        done = notebooks.run(made, Path(folder))
        for picture in PICTURE.findall(page):
            file = Path(folder) / "runs" / picture / "curves.png"
            if file.exists():
                (PAGE.parent / f"learn-{picture}.png").write_bytes(file.read_bytes())
    for ran in done:
        say(json.dumps({ran.name: ran.seconds}))
        row = results.row(ran.name, "cpu", ran.seconds, commands=ran.commands, output=ran.output)
        results.put(RESULT, [row])
