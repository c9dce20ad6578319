"""docs/learn.md: its notebook is made from it and runs; its commands and results are today's."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.experiments.run import EXPERIMENTS
from evidence import lesson, notebook
from lockstep import twin
from lockstep.cli import commands, trainers
from lockstep.config import from_flags
from lockstep.errors import UserError, require
from lockstep.parity import catalogue, operands

CLASSIC = dict.fromkeys((
    "fp16-without-scaling", "loss-not-divided", "dropout-redrawn", "clip-before-unscale",
    "moments-in-bfloat16", "bfloat16-master-weights", "norms-in-bfloat16",
), "different")  # fmt: skip
HIDDEN = {"loss-not-divided": "equal", "moments-in-bfloat16": "equal"}  # in cells tagged slow
MACHINES = [
    {"HALF": "bf16", "MODEL": "tiny", "STEPS": "60", "DEVICE": "cpu"},
    {"HALF": "fp16", "MODEL": "10m", "STEPS": "300", "DEVICE": "cuda"},
]
PAGE = lesson.PAGE.read_text()
MADE = lesson.made(PAGE)
RESULT = json.loads(lesson.RESULT.read_text())["cells"]
# What the page alone has: installing, and what takes minutes.
TYPED = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.M | re.S)


CODE = [cell for cell in MADE["cells"] if cell["cell_type"] == "code"]


def tagged(cell: dict[str, Any], tag: str) -> bool:
    return tag in cell["metadata"].get("tags", [])


def commands_of(cell: dict[str, Any]) -> list[str]:
    return [line[1:].strip() for line in cell["source"] if line.startswith("!")]


def refused(command: str) -> str:
    """Why a command cannot be right; empty if it can."""
    program, *words = shlex.split(command)
    if program == "python":
        module, words = words[1], words[2:]
    try:
        if program == "lockstep":
            given = vars(commands.lockstep_parser().parse_args(words))
            if given["command"].__name__ == "_curves":
                own = {k: v for k, v in given.items() if k not in ("a", "b", "bug", "out")}
                own.pop("command")
                for side in ("a", "b"):
                    operands.parse(given[side], {"model": "tiny", **own})
                if given["bug"]:
                    catalogue.find(given["bug"])
        elif module in twin.MODULES.values():
            given = vars(trainers.trainer_parser(module).parse_args(words))
            from_flags({k: v for k, v in given.items() if k != "out"}, accelerator=False)
        else:
            require(module == "benchmarks.run", "module", module, "is not known here")
            require(words[0] in EXPERIMENTS, "experiment", words[0], "there is none")
    except UserError as error:
        return str(error)
    return ""


def verdict(output: str) -> str:
    """Of `lockstep curves`; empty in what another command printed."""
    said = re.search(r"^(equal|different|inconclusive):", output, re.M)
    return said[1] if said else ""


def test_the_notebook_is_that_of_the_page() -> None:
    anew = "write it anew: python -m evidence.tables"
    assert lesson.NOTEBOOK.read_text() == lesson.file(MADE), anew


def test_a_notebook_has_the_form_that_jupyter_reads() -> None:
    assert (MADE["nbformat"], MADE["nbformat_minor"]) == (4, 5)
    names = [cell["id"] for cell in MADE["cells"]]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name) for name in names)
    for cell in MADE["cells"]:
        keys = {"cell_type", "id", "metadata", "source"}
        code = {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        assert set(cell) == keys | code


def test_page_and_notebook_have_what_is_theirs() -> None:
    page = (
        "<!-- page -->\nmake setup\n<!-- table learn_a -->\n1 s\n<!-- end -->\n<!-- end -->\n"
        "text\n\n```sh a status=1 bf16={HALF}\nlockstep x:bf16\n```\n<!-- table learn_a -->\n2 s\n"
        "<!-- end -->\n<!-- notebook\n```python b tag=parameters\nHALF = 1\n```\n-->\nend\n"
    )
    text, a, b, end = lesson.made(page)["cells"]
    assert (text["source"], end["source"]) == (["text"], ["end"])
    assert (a["source"], a["metadata"]) == (["!lockstep x:{HALF}"], {"status": 1})
    assert (b["source"], b["metadata"]) == (["HALF = 1"], {"tags": ["parameters"]})


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine["DEVICE"])
def test_every_command_parses(machine: dict[str, str]) -> None:
    cells = [cell for cell in CODE if not tagged(cell, "setup")]
    found = [command.format(**machine) for cell in cells for command in commands_of(cell)]
    typed = [line for block in TYPED for line in block.splitlines()]
    assert len(found) > 15 and len(typed) == 3
    assert {command: refused(command) for command in found + typed if refused(command)} == {}


@pytest.mark.parametrize("wrong", [
    "lockstep curves jax:bf16 torch:bf16 --bug none-such",
    "lockstep curves jax:bf17 torch:bf16",
    "lockstep curves jax:bf16 torch:bf16 --remat all",
    "lockstep sensitivity --polcy bf16",
    "python -m torch_ref.train --model tiny --policy fp16 --loss-scale-init 3",
    "python -m benchmarks.run nothing",
])  # fmt: skip
def test_a_wrong_command_is_seen(wrong: str) -> None:
    assert refused(wrong)


def test_each_failure_point_has_its_command_and_its_verdict() -> None:
    """As the committed run has them; that they are so today, the run below says."""
    found: dict[bool, dict[str, str]] = {False: {}, True: {}}
    for cell in CODE:
        for command in commands_of(cell):
            if "--bug" in command:
                name = command.split("--bug ")[1].split()[0]
                found[tagged(cell, "slow")][name] = verdict(RESULT[cell["id"]]["output"])
    assert found == {False: CLASSIC, True: HIDDEN}


def test_the_results_are_those_of_the_page_s_commands() -> None:
    for cell in lesson.CELL.finditer(PAGE):
        if cell[1] == "sh":
            assert RESULT[cell[2]]["commands"] == cell[4].splitlines(), "python -m evidence.lesson"


def execute(path: Path, folder: Path, *given: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "evidence.notebook", str(path), *given],
        cwd=folder, env=os.environ | {"PYTHONPATH": str(lesson.ROOT)},
        capture_output=True, text=True,
    )  # fmt: skip


def test_every_cell_runs(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """All but the set-up, which installs. By default the trainers' runs are short, and what is
    tagged slow is left out; with --full all is run as it stands. The seven are, always."""
    full = request.config.getoption("--full")
    given = [] if full else ["STEPS=3", "MODEL=tiny --n-layer 1 --context 32", "without=slow"]
    done = execute(lesson.NOTEBOOK, tmp_path, *given)
    assert done.returncode == 0, done.stderr[-3000:]
    ran = {cell["name"]: cell for cell in json.loads(done.stdout)}
    left_out = ("setup",) if full else ("setup", "slow")
    expected = [cell["id"] for cell in CODE if not any(tagged(cell, tag) for tag in left_out)]
    assert list(ran) == expected
    said = {name: verdict(cell["output"]) for name, cell in ran.items()}
    assert said == {name: verdict(RESULT[name]["output"]) for name in ran}
    assert sum(1 for found in said.values() if found) >= len(CLASSIC) + 1


def cell(source: str, **metadata: Any) -> dict[str, Any]:
    lines = source.splitlines(keepends=True)
    return {"cell_type": "code", "id": "it", "metadata": metadata, "source": lines}


@pytest.mark.parametrize(("source", "message"), [
    ("1 / 0", "ZeroDivisionError"),
    ("x = (", "SyntaxError"),
    ("!exit 3", "status 3, not 0"),
    ("!echo right\n!nothing-of-that-name", "status 127"),
    ("from IPython.display import Image\nImage('none.png')", "FileNotFoundError"),
])  # fmt: skip
def test_a_cell_that_fails_is_seen(source: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "it.ipynb"
    path.write_text(json.dumps({"cells": [cell("print('before')"), cell(source)]}))
    done = execute(path, tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    assert "cell it" in done.stderr and message in done.stderr


def test_a_command_that_should_fail_and_does_not_is_seen() -> None:
    with pytest.raises(notebook.CellFailed, match="status 0, not 1"):
        notebook.run({"cells": [cell("!true", status=1)]}, {}, print)


def test_variables_reach_the_shell_and_given_ones_come_first() -> None:
    cells = [
        cell("A, B = 1, 2", tags=["parameters"]),
        cell("!echo {A} {B}"),
        cell("1 / 0", tags=["slow"]),
    ]
    (_, ran) = notebook.run({"cells": cells}, {"B": "3"}, print, without="slow")
    assert (ran.commands, ran.output) == (["echo 1 3"], "1 3\n")
