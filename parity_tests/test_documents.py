"""What the documents point at is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def missing(text: str, folder: Path) -> list[str]:
    """The `file.py:name`, `test_file.py` and links of a document that lead nowhere."""
    found = []
    for file, name in re.findall(r"`([\w/]+\.py):(\w+)`", text):
        path = ROOT / file
        if not path.exists() or not re.search(
            rf"\b(def|class) {name}\b|^{name} = ", path.read_text(), re.M
        ):
            found.append(f"{file}:{name}")
    for file in re.findall(r"`(?:parity_tests/)?(test_\w+\.py)`", text):
        found += [] if (ROOT / "parity_tests" / file).exists() else [file]
    for link in re.findall(r"\]\(([\w./-]+)\)", text):
        found += [] if (folder / link).exists() else [link]
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_nothing_leads_nowhere(document: Path) -> None:
    assert missing(document.read_text(), document.parent) == []


def test_what_is_gone_is_seen() -> None:
    gone = "`jax_impl/optim.py:sgd` and `jax_impl/none.py:adamw`, `test_none.py`, [x](docs/none.md)"
    assert len(missing(gone, ROOT)) == 4
