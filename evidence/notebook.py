"""The code cells of a notebook, run in order by nbclient."""

import copy
import os
import re
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from lockstep.process import ROOT

# In place of `!`: what ends with another status than the cell's is an error, and its own stderr is
# not among what it printed; each command goes to stderr, from where it is kept.
SHELL = """
import subprocess, sys
def __shell__(command, status):
    print("$", command, file=sys.stderr, flush=True)
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    if done.returncode != status:
        said = f"{done.stdout}{done.stderr}"[-2000:]
        raise RuntimeError(f"{command}: status {done.returncode}, not {status}\\n{said}")
    print(done.stdout, end="")
"""


@dataclass
class Ran:
    name: str
    commands: list[str]  # what the shell was given
    output: str  # what went to stdout
    seconds: float


def run(
    notebook: Any, folder: Path, given: dict[str, str] | None = None, without: str = ""
) -> list[Ran]:
    """Every code cell but those tagged `setup`, which installs, or as `without` names.

    Args:
        folder: where it runs; the commands are this Python's, and the packages this repository's.
        given: replaces what the cell tagged `parameters` sets.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised, or a command ended with another
            status than the cell's.
    """
    chosen = [
        copy.deepcopy(cell)
        for cell in notebook.cells
        if cell.cell_type == "code" and not {"setup", without} & set(cell.metadata.get("tags", []))
    ]
    for cell in chosen:
        status = cell.metadata.get("status", 0)
        call = lambda line, status=status: f"__shell__({line[1]!r}.format(**globals()), {status})"  # noqa: E731
        cell.source = re.sub(r"^!(.*)$", call, cell.source, flags=re.M)
        if "parameters" in cell.metadata.get("tags", []):
            cell.source += "".join(f"\n{name} = {value!r}" for name, value in (given or {}).items())
    whole = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(SHELL), *chosen], metadata=notebook.metadata
    )
    paths = {"PATH": Path(sys.executable).parent, "PYTHONPATH": ROOT}
    ahead = {name: os.pathsep.join(filter(None, [str(path), os.environ.get(name)]))
             for name, path in paths.items()}  # fmt: skip
    client = NotebookClient(whole, timeout=None, resources={"metadata": {"path": str(folder)}})
    client.execute(env=os.environ | ahead)
    return [_ran(cell) for cell in chosen]


def _ran(cell: Any) -> Ran:
    streams = {"stdout": "", "stderr": ""}
    for output in cell.outputs:
        if output.output_type == "stream":
            streams[output.name] += output.text
    times = cell.metadata.execution
    began, ended = (datetime.fromisoformat(times[name])
                    for name in ("iopub.execute_input", "shell.execute_reply"))  # fmt: skip
    commands = re.findall(r"^\$ (.*)$", streams["stderr"], re.M)
    return Ran(cell.id, commands, streams["stdout"], (ended - began).total_seconds())
