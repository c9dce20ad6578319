"""docs/learn.md is the one source: of the notebook, and of what is run for the page's figures.

    python -m evidence.lesson [CELL ...]      # runs the cells here; minutes
    python -m evidence.tables                 # writes what they printed, and the notebook

A fence with a name is a cell: ```sh NAME [status=1] [tag=TAG] [show=REGEX] [OLD={NEW} ...]. The
page shows it as it stands, and behind it, as `<!-- table learn_NAME -->`, the lines of its output
that match. In the notebook each line is a `!` line, OLD is replaced by the variable NEW, and

    <!-- notebook ... -->          is there, and hidden in the page
    <!-- page --> ... <!-- end --> is in the page alone, as are the tables
"""

import json
import re
import shlex
import sys
import tempfile
from contextlib import chdir
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evidence import notebook
from lockstep import provenance
from lockstep.cli.flags import Parser
from lockstep.errors import require
from lockstep.exits import exit_status
from lockstep.process import ROOT

PAGE, NOTEBOOK = ROOT / "docs" / "learn.md", ROOT / "docs" / "learn.ipynb"
RESULT = ROOT / "docs" / "results" / "learn-cpu.json"
CELL = re.compile(r"^```(sh|python) (\w+)(.*)\n((?:.*\n)*?)```\n", re.M)
TABLE = re.compile(r"<!-- table \w+ -->\n.*?<!-- end -->\n", re.S)
ALONE = re.compile(r"<!-- page -->\n.*?<!-- end -->\n", re.S)
HIDDEN = re.compile(r"<!-- notebook\n(.*?)-->\n", re.S)
PICTURE = re.compile(r"!\[.*\]\(learn-(\w+)\.png\)")  # of runs/NAME
PLATFORM = {
    "accelerator": "GPU",
    "colab": {"gpuType": "T4", "provenance": []},
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def made(page: str) -> dict[str, Any]:
    """The notebook of the page: nbformat 4.5, without outputs, the same bytes each time."""
    text = HIDDEN.sub(r"\1", ALONE.sub("", TABLE.sub("", page)))
    cells: list[dict[str, Any]] = []

    def prose(part: str) -> None:
        if part.strip():
            kind = {"cell_type": "markdown", "id": f"text-{len(cells)}", "metadata": {}}
            cells.append({**kind, "source": part.strip("\n").splitlines(keepends=True)})

    end = 0
    for cell in CELL.finditer(text):
        prose(text[end : cell.start()])
        cells.append(_code(cell))
        end = cell.end()
    prose(text[end:])
    return {"cells": cells, "metadata": PLATFORM, "nbformat": 4, "nbformat_minor": 5}


def _code(cell: re.Match[str]) -> dict[str, Any]:
    language, name, _, source = cell.groups()
    given = options(cell)
    metadata: dict[str, Any] = {}
    if "status" in given:
        metadata["status"] = int(given.pop("status"))
    if "tag" in given:
        metadata["tags"] = [given.pop("tag")]
    given.pop("show", None)
    for old, new in given.items():
        assert old in source, f"{name}: there is no {old} to replace"
        source = source.replace(old, new)
    lines = source.rstrip("\n").splitlines(keepends=True)
    if language == "sh":
        lines = [f"!{line}" for line in lines]
    return {
        "cell_type": "code", "execution_count": None, "id": name, "metadata": metadata,
        "outputs": [], "source": lines,
    }  # fmt: skip


def options(cell: re.Match[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in shlex.split(cell[3]))


def file(notebook: dict[str, Any]) -> str:
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def table(name: str, content: dict[str, Any], page: str) -> str:
    """What a cell printed, of what the page shows; of `minutes`, how long all cells took."""
    cells, cores = content["cells"], content["cores"]
    if name == "minutes":
        minutes = sum(cell["seconds"] for cell in cells.values()) / 60
        return f"All of it computes for {minutes:.0f} minutes on {cores} CPU cores."
    if name not in cells:
        return f"Not run yet. `python -m evidence.lesson {name}` does it."
    (show,) = (options(cell).get("show", "") for cell in CELL.finditer(page) if cell[2] == name)
    lines = [line for line in cells[name]["output"].splitlines() if re.search(show, line)]
    return "\n".join(["```text", *lines, "```", "", f"*{cells[name]['seconds']:.0f} s*"])


def measure(names: list[str]) -> None:
    """Runs the notebook's cells here, all or those named, and keeps what they printed."""
    page = PAGE.read_text()
    whole = made(page)
    order = [cell["id"] for cell in whole["cells"] if cell["cell_type"] == "code"]
    for name in names:
        require(name in order, "CELL", name, f"unknown; use {', '.join(order)}")
    if names:
        whole["cells"] = [
            cell for cell in whole["cells"]
            if cell["id"] in names or "parameters" in cell["metadata"].get("tags", [])
        ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        done = notebook.run(whole, {}, lambda line: print(line, flush=True))
        for name in PICTURE.findall(page):
            picture = Path("runs") / name / "curves.png"
            if picture.exists():
                (PAGE.parent / f"learn-{name}.png").write_bytes(picture.read_bytes())
    cells = json.loads(RESULT.read_text())["cells"] if names else {}
    cells |= {ran.name: asdict(ran) for ran in done}
    kept = {name: cells[name] for name in order if name in cells}
    content = provenance.about("cpu") | {"cells": kept}
    RESULT.write_text(json.dumps(content, indent=1) + "\n")


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = Parser(prog="python -m evidence.lesson", description=__doc__)
    parser.add_argument("cells", metavar="CELL", nargs="*", help="which (default: all)")
    measure(parser.parse_args(argv).cells)
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
