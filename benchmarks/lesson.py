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
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import jupytext
import nbformat
from nbclient import NotebookClient

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
# In place of `!`: a command that ends with another status than the cell's is an error.
SHELL = """
import subprocess
def __shell__(command, status):
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    if done.returncode != status:
        said = f"{done.stdout}{done.stderr}"[-2000:]
        raise RuntimeError(f"{command}: status {done.returncode}, not {status}\\n{said}")
    print(done.stdout, end="")
"""


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


def code_cells() -> list[str]:
    """The names of the page's cells, without the one that installs."""
    page = PAGE.read_text(encoding="utf-8")
    return [cell[2] for cell in CELL.finditer(page) if "tag=setup" not in cell[3]]


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
    (show,) = (read_options(c).get("show", "") for c in CELL.finditer(page) if c[2] == name)
    lines = [line for line in rows[name]["output"].splitlines() if re.search(show, line)]
    return "\n".join(["```text", *lines, "```", "", f"*{rows[name]['measured']['seconds']:.0f} s*"])


class Ran(NamedTuple):
    output: str  # what the cell printed
    seconds: float


def run(notebook: Any, folder: Path) -> dict[str, Ran]:
    """Runs every code cell but those tagged `setup`, which install.

    Args:
        folder: where they run; the commands are this Python's, and the packages this repository's.

    Returns:
        What came of each, by the cell's name.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised, or a command ended with another
            status than the cell's.
    """
    chosen = [
        cell
        for cell in notebook.cells
        if cell.cell_type == "code" and "setup" not in cell.metadata.get("tags", [])
    ]
    for cell in chosen:
        cell.source = _call_shell(cell.source, cell.metadata.get("status", 0))
    whole = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(SHELL), *chosen], metadata=notebook.metadata
    )
    ahead = {"PATH": Path(sys.executable).parent, "PYTHONPATH": ROOT}
    changes = {
        name: f"{path}{os.pathsep}{os.environ.get(name, '')}" for name, path in ahead.items()
    }
    client = NotebookClient(whole, timeout=None, resources={"metadata": {"path": str(folder)}})
    client.execute(env=os.environ | changes)
    return {cell.id: _read_result(cell) for cell in chosen}


def _call_shell(source: str, status: int) -> str:
    """A cell's source with calls of `SHELL` in place of `!` lines."""

    def call(line: re.Match[str]) -> str:
        return f"__shell__({line[1]!r}.format(**globals()), {status})"

    return re.sub(r"^!(.*)$", call, source, flags=re.M)


def _read_result(cell: Any) -> Ran:
    printed = "".join(
        out.text for out in cell.outputs if out.output_type == "stream" and out.name == "stdout"
    )
    times = cell.metadata.execution
    began, ended = (
        datetime.fromisoformat(times[name])
        for name in ("iopub.execute_input", "shell.execute_reply")
    )
    return Ran(printed, (ended - began).total_seconds())


def main(argv: list[str] | None = None) -> int:
    """The command line: runs the cells, all or those named, and keeps what they printed."""
    parser = Parser(prog="python -m benchmarks.lesson", description=__doc__)
    parser.add_argument("cells", metavar="CELL", nargs="*", help="which (default: all)")
    names = parser.parse_args(argv).cells
    order = code_cells()
    for name in names:
        require(name in order, "CELL", name, f"unknown; use {', '.join(order)}")
    page = PAGE.read_text(encoding="utf-8")
    made = make_notebook(page)
    if names:
        made.cells = [
            cell
            for cell in made.cells
            if cell.id in names or "parameters" in cell.metadata.get("tags", [])
        ]
    sources = {cell[2]: cell[4].splitlines() for cell in CELL.finditer(page) if cell[1] == "sh"}
    with tempfile.TemporaryDirectory() as folder:
        done = run(made, Path(folder))
        for picture in PICTURE.findall(page):
            file = Path(folder) / "runs" / picture / "curves.png"
            if file.exists():
                (PAGE.parent / f"learn-{picture}.png").write_bytes(file.read_bytes())
    for name, ran in done.items():
        say(json.dumps({name: ran.seconds}))
        commands = sources.get(name, [])
        row = results.row(name, "cpu", ran.seconds, commands=commands, output=ran.output)
        results.put(RESULT, [row])
    return DONE


if __name__ == "__main__":
    sys.exit(exit_status(main, interruptible=True))
