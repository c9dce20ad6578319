"""Run the commands of docs/learn.md: `python -m benchmarks.lesson [CELL ...]`; minutes.

The page is the one source: of what is run, of its figures and of the notebook. A fence with a name
is a cell: ```sh NAME [status=1] [tag=TAG] [show=REGEX] [OLD={NEW} ...]. The page shows it as it
stands, and behind it, as `<!-- table learn_NAME -->`, the lines of its output that match. In the
notebook each line is a `!` line, OLD is replaced by the variable NEW, and

    <!-- notebook ... -->          is there, and hidden in the page
    <!-- page --> ... <!-- end --> is in the page alone, as are the tables
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jupytext

from benchmarks.jobs import say
from lockstep import results
from lockstep.errors import require
from lockstep.exits import DONE, exit_status
from lockstep.flags import Parser
from lockstep.process import ROOT
from lockstep.results import Row

PAGE, NOTEBOOK = ROOT / "docs" / "learn.md", ROOT / "docs" / "learn.ipynb"
RESULT = ROOT / "docs" / "results" / "learn.jsonl"
CELL = re.compile(r"^```(sh|python) (\w+)(.*)\n((?:.*\n)*?)```\n", re.M)
TABLE = re.compile(r"<!-- table \w+ -->\n.*?<!-- end -->\n", re.S)
ALONE = re.compile(r"<!-- page -->\n.*?<!-- end -->\n", re.S)
HIDDEN = re.compile(r"<!-- notebook\n(.*?)-->\n", re.S)
UNNAMED = re.compile(r"^```(sh|python)$", re.M)  # prose: jupytext's word for that is .noeval
PICTURE = re.compile(r"!\[.*\]\(learn-(\w+)\.png\)")  # of runs/NAME
PLATFORM = {
    "accelerator": "GPU",
    "colab": {"gpuType": "T4", "provenance": []},
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def make_notebook(page: str) -> Any:
    """The notebook of the page: nbformat 4.5, without outputs, the same bytes each time."""
    page = HIDDEN.sub(r"\1", ALONE.sub("", TABLE.sub("", page)))
    names = iter([cell[2] for cell in CELL.finditer(page)])
    made = jupytext.reads(UNNAMED.sub(r"\g<0> .noeval", CELL.sub(_fence, page)), fmt="md")
    made.metadata, made.nbformat, made.nbformat_minor = PLATFORM, 4, 5
    for number, cell in enumerate(made.cells):
        cell.id = next(names) if cell.cell_type == "code" else f"text-{number}"
        cell.source = cell.source.replace(" .noeval\n", "\n").rstrip("\n")
        kept = {"status", "tags"} & set(cell.metadata)
        cell.metadata = {name: cell.metadata[name] for name in sorted(kept)}
    return made


def _fence(cell: re.Match[str]) -> str:
    """A cell of the page as one of jupytext's Markdown."""
    language, name, _, source = cell.groups()
    given = read_options(cell)
    metadata = f" status={given.pop('status')}" if "status" in given else ""
    metadata += f' tags=["{given.pop("tag")}"]' if "tag" in given else ""
    given.pop("show", None)
    for old, new in given.items():
        assert old in source, f"{name}: there is no {old} to replace"
        source = source.replace(old, new)
    if language == "sh":
        source = re.sub("^", "!", source.rstrip("\n"), flags=re.M) + "\n"
    return f"```python {metadata.strip()}\n{source}```\n"


def read_options(cell: re.Match[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in shlex.split(cell[3]))


def cells_of(page: str) -> dict[str, re.Match[str]]:
    """The page's cells by name, without those that the notebook alone has."""
    return {cell[2]: cell for cell in CELL.finditer(HIDDEN.sub("", page))}


def write_notebook(page: str) -> str:
    """The text of the notebook's file."""
    return jupytext.writes(make_notebook(page), fmt="ipynb")


def table(name: str, rows: dict[str, Row], page: str) -> str:
    """The lines of a cell's output that the page shows; `minutes`: how long all cells took."""
    if name == "minutes":
        minutes = sum(row["measured"]["seconds"] for row in rows.values()) / 60
        cores = {row["measured"]["cpu"]["cores"] for row in rows.values()}
        return f"All but section 7 computes for {minutes:.0f} minutes on {max(cores)} CPU cores."
    if name not in rows:
        return f"Not run yet. `python -m benchmarks.lesson {name}` does it."
    show = read_options(cells_of(page)[name]).get("show", "")
    lines = [line for line in rows[name]["output"].splitlines() if re.search(show, line)]
    return "\n".join(["```text", *lines, "```", "", f"*{rows[name]['measured']['seconds']:.0f} s*"])


def run(cell: re.Match[str], folder: Path) -> str:
    """Runs a cell of the page: each line of a shell, or a Python program.

    Args:
        folder: where it runs; the commands are this Python's, and the packages this repository's.

    Returns:
        What it printed.

    Raises:
        RuntimeError: a command ended with another status than the cell's.
    """
    language, name, _, source = cell.groups()
    status = int(read_options(cell).get("status", 0))
    ahead = {"PATH": Path(sys.executable).parent, "PYTHONPATH": ROOT}
    changes = {k: f"{path}{os.pathsep}{os.environ.get(k, '')}" for k, path in ahead.items()}
    printed = ""
    for command in source.splitlines() if language == "sh" else [source]:
        words = ["sh", "-c", command] if language == "sh" else [sys.executable, "-c", command]
        done = subprocess.run(words, cwd=folder, env=os.environ | changes, capture_output=True,
                              text=True)  # fmt: skip
        if done.returncode != status:
            said = f"{done.stdout}{done.stderr}"[-2000:]
            raise RuntimeError(f"{name}: {command}: status {done.returncode}\n{said}")
        printed += done.stdout
    return printed


def main(argv: list[str] | None = None) -> int:
    """The command line: runs the cells, all or those named, and keeps what they printed."""
    parser = Parser(prog="python -m benchmarks.lesson", description=__doc__)
    parser.add_argument("cells", metavar="CELL", nargs="*", help="which (default: all)")
    page = PAGE.read_text(encoding="utf-8")
    cells = cells_of(page)
    names = parser.parse_args(argv).cells or list(cells)
    for name in names:
        require(name in cells, "CELL", name, f"unknown; use {', '.join(cells)}")
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            began = time.perf_counter()
            output, seconds = run(cells[name], Path(folder)), time.perf_counter() - began
            say(json.dumps({name: seconds}))
            commands = cells[name][4].splitlines() if cells[name][1] == "sh" else []
            row = results.row(name, "cpu", seconds, commands=commands, output=output)
            results.put(RESULT, [row])
        for picture in PICTURE.findall(page):
            file = Path(folder) / "runs" / picture / "curves.png"
            if file.exists():
                (PAGE.parent / f"learn-{picture}.png").write_bytes(file.read_bytes())
    return DONE


if __name__ == "__main__":
    sys.exit(exit_status(main, interruptible=True))
