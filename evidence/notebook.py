"""The code cells of a notebook, run in order, without Jupyter.

    python -m evidence.notebook docs/learn.ipynb STEPS=3 without=slow

A line that begins with `!` goes to a shell, with {name} replaced by the variable; all else is
Python. NAME=VALUE replaces what the cell tagged `parameters` sets. Left out are the cell tagged
`setup`, which installs, and those of the tag that `without` names. Prints what ran as JSON; the
exit status is 1 if a cell fails.
"""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from lockstep.cli.flags import Parser
from lockstep.errors import require
from lockstep.exits import exit_status
from lockstep.process import ROOT


class CellFailed(Exception):
    """Names the cell, and says what happened."""


@dataclass
class Ran:
    name: str
    commands: list[str] = field(default_factory=list)  # what the shell was given
    output: str = ""  # what went to stdout
    seconds: float = 0.0


def run(
    notebook: dict[str, Any], given: dict[str, str], say: Callable[[str], None], without: str = ""
) -> list[Ran]:
    """Every code cell but those left out, in one namespace.

    Raises:
        CellFailed: a cell raised, or a command ended with another status than the cell's.
    """
    namespace: dict[str, Any] = {}
    done = []
    with _stubbed_ipython(), _found_by_shells():
        for cell in notebook["cells"]:
            tags = cell["metadata"].get("tags", [])
            if cell["cell_type"] != "code" or {"setup", without} & set(tags):
                continue
            done.append(_cell(cell, namespace))
            if "parameters" in tags:
                namespace |= given
            say(f"{done[-1].name}: {done[-1].seconds:.0f} s")
    return done


def _cell(cell: dict[str, Any], namespace: dict[str, Any]) -> Ran:
    ran = Ran(name=cell["id"])
    status = cell["metadata"].get("status", 0)

    def shell(text: str) -> None:
        ran.commands.append(text.format(**namespace))
        print(_output(ran.commands[-1], status), end="")

    namespace["__shell__"] = shell
    text = "".join(cell["source"])
    source = re.sub(r"^!(.*)$", lambda m: f"__shell__({m[1]!r})", text, flags=re.M)
    printed, began = io.StringIO(), time.perf_counter()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(source, ran.name, "exec"), namespace)
    except Exception as error:
        raise CellFailed(f"cell {ran.name}: {type(error).__name__}: {error}") from error
    ran.seconds, ran.output = time.perf_counter() - began, printed.getvalue()
    return ran


def _output(command: str, status: int) -> str:
    """Its stdout. Raises RuntimeError if it ends with another status."""
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    if done.returncode != status:
        said = f"{done.stdout}{done.stderr}"[-2000:]
        raise RuntimeError(f"{command}: status {done.returncode}, not {status}\n{said}")
    return done.stdout


@contextlib.contextmanager
def _found_by_shells() -> Iterator[None]:
    """The commands are this Python's, and the packages this folder's."""
    ahead = {"PATH": Path(sys.executable).parent, "PYTHONPATH": ROOT}
    former = {name: os.environ.get(name, "") for name in ahead}
    for name, folder in ahead.items():
        os.environ[name] = os.pathsep.join(filter(None, [str(folder), former[name]]))
    try:
        yield
    finally:
        os.environ.update(former)


@contextlib.contextmanager
def _stubbed_ipython() -> Iterator[None]:
    """Jupyter shows a picture; here it only has to be there."""

    class Image:
        def __init__(self, filename: str) -> None:
            with open(filename, "rb") as file:
                assert file.read(8) == b"\x89PNG\r\n\x1a\n", f"{filename} is no PNG"

    display = ModuleType("IPython.display")
    display.Image = Image  # type: ignore[attr-defined]
    stubs = {"IPython": ModuleType("IPython"), "IPython.display": display}
    former = {name: sys.modules.get(name) for name in stubs}
    sys.modules |= stubs
    try:
        yield
    finally:
        for name, module in former.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = Parser(prog="python -m evidence.notebook", description=__doc__)
    parser.add_argument("file", metavar="FILE", type=Path)
    parser.add_argument("pairs", metavar="NAME=VALUE", nargs="*")
    words = parser.parse_args(argv)
    require(words.file.is_file(), "FILE", words.file, "no such file; name a notebook")
    for pair in words.pairs:
        require("=" in pair, "NAME=VALUE", pair, "has no =; give one")
    given = dict(pair.split("=", 1) for pair in words.pairs)
    without = given.pop("without", "")
    notebook = json.loads(words.file.read_text())
    try:
        done = run(notebook, given, partial(print, file=sys.stderr, flush=True), without)
    except CellFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps([asdict(ran) for ran in done]))
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
