"""docs/learn.md: its notebook is made from it and runs; its commands and results are today's."""

import json
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from benchmarks import documents, lesson
from parity_tests.house.quoted import refusal
from parity_tests.tiers import tier

SHOWN = dict.fromkeys((
    "fp16-without-scaling", "loss-not-divided", "dropout-redrawn", "clip-before-unscale",
    "moments-in-bfloat16", "bfloat16-master-weights", "norms-in-bfloat16",
    "mean-of-micro-batch-means",
), "different")  # fmt: skip
HIDDEN = {"loss-not-divided": "equal", "moments-in-bfloat16": "equal"}  # in cells tagged slow
MACHINES = [
    {"HALF": "bf16", "MODEL": "tiny", "STEPS": "60", "DEVICE": "cpu"},
    {"HALF": "fp16", "MODEL": "10m", "STEPS": "300", "DEVICE": "cuda"},
]
PAGE = lesson.PAGE.read_text()
MADE = json.loads(lesson.write_notebook(PAGE))
RESULT, CELLS = documents.LEARN.rows, lesson.cells_of(PAGE)
# What the page alone has: installing, and what takes minutes.
TYPED = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.M | re.S)
CODE = [cell for cell in MADE["cells"] if cell["cell_type"] == "code"]


def has_tag(cell: dict[str, Any], tag: str) -> bool:
    return tag in cell["metadata"].get("tags", [])


def commands_of(cell: dict[str, Any]) -> list[str]:
    return [line[1:].strip() for line in cell["source"] if line.startswith("!")]


def verdict(output: str) -> str:
    """The verdict of `lockstep curves`; empty in what another command printed."""
    said = re.search(r"^(equal|different|inconclusive):", output, re.M)
    return said[1] if said else ""


def test_the_notebook_is_that_of_the_page() -> None:
    anew = "write it anew: python -m benchmarks.documents"
    assert json.loads(lesson.NOTEBOOK.read_text()) == MADE, anew
    nbformat.validate(MADE)
    alone = {"setup", "machine", "order_picture", "master_picture"}
    assert {cell["id"] for cell in CODE} == {*CELLS, *alone}
    assert set(RESULT) == set(CELLS)


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine["DEVICE"])
def test_every_command_parses(machine: dict[str, str]) -> None:
    cells = [cell for cell in CODE if not has_tag(cell, "setup")]
    found = [command.format(**machine) for cell in cells for command in commands_of(cell)]
    typed = [line for block in TYPED for line in block.splitlines()]
    assert len(found) > 15 and len(typed) == 2
    assert {command: refusal(command) for command in found + typed if refusal(command)} == {}


def test_each_failure_point_has_its_command_and_its_verdict() -> None:
    """The committed run has these verdicts; the run below says that they are so today."""
    found: dict[bool, dict[str, str]] = {False: {}, True: {}}
    for cell in CODE:
        for command in commands_of(cell):
            if "--bug" in command:
                name = command.split("--bug ")[1].split()[0]
                found[has_tag(cell, "slow")][name] = verdict(RESULT[cell["id"]]["output"])
    assert found == {False: SHOWN, True: HIDDEN}


def test_the_results_are_those_of_the_page_s_commands() -> None:
    for name, cell in CELLS.items():
        if cell[1] == "sh":
            assert RESULT[name]["commands"] == cell[4].splitlines()


@tier("full", guard="the results that the page shows are the record's")
def test_every_cell_runs(tmp_path: Path) -> None:
    verdicts = {name: verdict(lesson.run(cell, tmp_path)) for name, cell in CELLS.items()}
    assert verdicts == {name: verdict(RESULT[name]["output"]) for name in CELLS}


def test_a_status_is_expected_and_another_one_is_seen(tmp_path: Path) -> None:
    page = "```sh a status=1\nexit 1\n```\n```sh b\nexit 3\n```\n```python c\nprint(1)\n```\n"
    cells = lesson.cells_of(page)
    assert [lesson.run(cells[name], tmp_path) for name in "ac"] == ["", "1\n"]
    with pytest.raises(RuntimeError, match="^b: exit 3: status 3"):
        lesson.run(cells["b"], tmp_path)
