"""The documents point only at what exists."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import documents, ladder
from lockstep.process import ROOT
from parity_tests.house.quoted import commands_in, refusal
from parity_tests.tiers import tier

pytestmark = tier("quick", guard="house rules")

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def missing(text: str, folder: Path) -> list[str]:
    """The `file.py:name`, `test_file.py`, paths and links of a document that lead nowhere."""
    found = []
    for file, name in re.findall(r"`([\w/]+\.py):(\w+)`", text):
        path = ROOT / file
        if not path.exists() or not re.search(
            rf"\b(def|class) {name}\b|^{name} = ", path.read_text(), re.M
        ):
            found.append(f"{file}:{name}")
    for file in re.findall(r"`(?:parity_tests/)?(test_\w+\.py)`", text):
        found += [] if any((ROOT / "parity_tests").rglob(file)) else [file]
    for path in re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", text):
        found += [] if (ROOT / path).exists() else [path]
    for link in re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", text):
        found += [] if (folder / link).exists() else [link]
    for link, anchor in re.findall(r"\]\(([\w./-]*\.md)?#([\w-]+)\)", text):
        page = (folder / link).read_text() if link and (folder / link).exists() else text
        found += [] if anchor in anchors(page) else [f"{link}#{anchor}"]
    return found


def anchors(page: str) -> set[str]:
    """Returns the anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page, re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_nothing_leads_nowhere(document: Path) -> None:
    assert missing(document.read_text(), document.parent) == []


def pages_linked() -> set[Path]:
    """Returns the pages that a link of a page leads to."""
    links = re.compile(r"\]\(([\w./-]+\.md)(?:#[\w-]+)?\)")
    return {
        (page.parent / link).resolve()
        for page in DOCUMENTS
        for link in links.findall(page.read_text())
    }


def test_every_page_is_linked() -> None:
    assert set(DOCUMENTS) <= pages_linked()


def test_decisions_are_listed_by_their_titles() -> None:
    index = (ROOT / "docs" / "decisions" / "README.md").read_text()
    for record in sorted((ROOT / "docs" / "decisions").glob("0*.md")):
        number, title = record.read_text().partition("\n")[0].removeprefix("# ").split(". ", 1)
        assert f"- {number}. [{title}]({record.name})\n" in index


def test_cited_decisions_exist() -> None:
    numbers = {int(path.name[:4]) for path in (ROOT / "docs" / "decisions").glob("0*.md")}
    tracked = subprocess.run(
        ["git", "ls-files", "*.py", "*.md", "*.toml"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    for file in tracked:
        if file == "CHANGELOG.md" or not (ROOT / file).exists():
            continue
        text = (ROOT / file).read_text()
        cited = re.findall(r"[Dd]ecision (\d+)|decisions/(\d{4})", text)
        assert {int(a or b) for a, b in cited} <= numbers, file
        for page in re.findall(r"docs/decisions/([\w-]+\.md)", text):
            assert (ROOT / "docs" / "decisions" / page).exists(), file


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_parses(document: Path) -> None:
    found = commands_in(document.read_text())
    assert {command: refusal(command) for command in found if refusal(command)} == {}


def test_commands_are_found() -> None:
    assert sum(len(commands_in(document.read_text())) for document in DOCUMENTS) > 50


@pytest.mark.parametrize("document", documents.DOCUMENTS, ids=lambda path: path.name)
def test_tables_are_those_of_the_results(document: Path) -> None:
    text = document.read_text()
    assert documents.render_blocks(text) == text, "write them anew: python -m benchmarks.documents"


def phrases(text: str) -> list[str]:
    """The rows of the phrasebook, without its head."""
    table = text.partition("## Phrasebook")[2].strip().partition("\n\n")[0]
    return table.splitlines()[2:]


def incomplete(row: str) -> list[str]:
    """The sides of a row that name no function of their twin (that it exists: `missing`)."""
    sides = {"torch_ref": row.split("|")[2], "jax_impl": row.split("|")[3]}
    return [t for t, cell in sides.items() if not re.search(rf"`{t}/[\w/]+\.py:\w+`", cell)]


def test_every_phrase_names_a_function_on_both_sides() -> None:
    rows = phrases((ROOT / "docs" / "parity.md").read_text())
    assert len(rows) >= 15
    assert [row for row in rows if incomplete(row)] == []


def outcome(verdict: str, figure: float, policy: str = "bf16", **more: Any) -> dict[str, Any]:
    worst = {"figure": figure, "bound": 2.0, "rule": "median error ratio"}
    found = {"rung": 3, "policy": policy, "row": "r", "verdict": verdict, "worst": worst}
    return found | {"seconds": 0.5, "emulated": policy == "tf32"} | more


def test_a_summary_keeps_the_most_damning_verdict_and_the_nearest_figure() -> None:
    outcomes = [outcome("equal", 1.0), outcome("equal", 1.5), outcome("equal", 0.5)]
    rows = ladder.summarise([*outcomes, outcome("equal", 1.0, "tf32")])
    assert "equal (1.5 of 2; 3)" in ladder.status(rows)
    assert "| bf16 | fp16 | tf32 (emulated) |" in ladder.status(rows)
    assert "emulated" not in ladder.status(ladder.summarise(outcomes))
    assert rows["bf16 3"]["seconds"] == 1.5
    for verdict, shown in (("inconclusive", "inconclusive"), ("different", "**different**")):
        worse = [*outcomes, outcome(verdict, 0.1), outcome("equal", 1.9)]
        assert f"{shown} (0.1 of 2; 5)" in ladder.status(ladder.summarise(worse))
