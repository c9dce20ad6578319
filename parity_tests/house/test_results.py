"""Rows of results: kept by name and device, with where they come from; bounds are the code's."""

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import lockstep
from benchmarks import documents
from lockstep import process, provenance, results
from lockstep.errors import UserError
from lockstep.judge import tolerances
from lockstep.judge.tolerances import Tolerance
from lockstep.process import ROOT


def test_a_row_replaces_that_of_its_name_and_device(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    assert results.read(file) == {}
    results.put(file, [results.row(name, "cpu", figure=1) for name in "ab"])
    results.put(file, [results.row("a", "cuda", figure=2), results.row("a", "cpu", figure=3)])
    assert {name: row["figure"] for name, row in results.read(file, "cpu").items()} == {
        "a": 3, "b": 1,
    }  # fmt: skip
    assert results.read(file, "cuda")["a"]["figure"] == 2
    assert len(file.read_text().splitlines()) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_of_rows_put_at_the_same_time_all_stay(tmp_path: Path) -> None:
    """Two who read, add and write by turns would lose each other's; the second waits here."""
    file, names = tmp_path / "rows.jsonl", [f"row {n}" for n in range(20)]
    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(lambda name: results.put(file, [results.row(name, "cpu")]), names))
    assert set(results.read(file)) == set(names)


@pytest.mark.parametrize("text", [
    "", "{}", "[]", '{"name": "a"}', '{"name": "a", "measured": {"device": "cpu"}}', "{", "\0",
])  # fmt: skip
def test_what_is_no_file_of_results_is_not_written_over(text: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(text)
    with pytest.raises(UserError, match="no file of results"):
        results.put(file, [results.row("a", "cpu")])
    assert file.read_text() == text


def test_what_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    """Its folder has gone since the command began."""
    file = tmp_path / "gone" / "rows.jsonl"
    with pytest.raises(UserError, match=f"^{file}: cannot be written .*; make room there$"):
        results.put(file, [results.row("a", "cpu")])


def test_a_row_says_where_it_was_measured() -> None:
    found = results.row("a", "cpu", 1.5)["measured"]
    assert set(found) == {"release", *results.MEASURED} and found["seconds"] == 1.5
    assert found["release"] == lockstep.__version__
    assert found["cpu"]["cores"] >= 1 and set(found["cpu"]["flags"] or ()) <= {*provenance.FLAGS}
    assert {"numpy", "jax", "torch"} <= set(found["versions"])


def test_cpus_of_one_name_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "model name\t: AMD EPYC\ncpu family\t: 25\nmodel\t\t: 17\nflags\t\t: avx2 fma\n"

    def told(text: str) -> dict[str, Any]:
        monkeypatch.setattr(Path, "read_text", lambda *_, **__: text)
        return provenance.cpu.__wrapped__()

    assert (told(text)["model"], told(text)["family"], told(text)["flags"]) == (
        "AMD EPYC", "25/17", ["avx2"],
    )  # fmt: skip
    assert told(text) != told(text.replace("17", "2"))
    assert told("")["family"] is None and told("")["flags"] is None


def committed_files() -> Iterator[Path]:
    for folder in process.RESULTS:
        yield from (ROOT / folder).glob("*")


# Rows that no table shows by itself, and what reads or counts them.
UNSHOWN = {
    **{
        f"docs/results/parity-h200{time}.jsonl": "docs/results.md"
        for time in ("", "-since", "-again")
    },
    **{
        f"benchmarks/results/h200{part}.jsonl": "benchmarks/frameworks.py"
        for part in ("", "-since", "-alone", "-presets")
    },
    "benchmarks/results/inductor.jsonl": "benchmarks/programs.py",
    "benchmarks/results/drift.jsonl": "parity_tests/benchmarks/test_report.py",
    "benchmarks/results/compiled-jax.jsonl": "parity_tests/plan/test_programs.py",
    "benchmarks/results/compiled-mesh.jsonl": "parity_tests/plan/test_programs.py",
    "benchmarks/results/compiled-torch.jsonl": "parity_tests/plan/test_programs.py",
    documents.LEARN.file: "parity_tests/house/test_lesson.py",
    "benchmarks/results/published.csv": "parity_tests/plan/test_published.py",  # others' runs
}


def test_every_committed_row_has_its_origin_and_its_table() -> None:
    files = [path for path in committed_files() if path.is_file()]
    ours = [path for path in files if path.suffix == ".jsonl"]
    assert [path.name for path in files if path not in ours] == ["published.csv"]
    assert all(results.read(file) for file in ours)
    shown = {table.file for table in documents.TABLES.values()}
    assert {str(file.relative_to(ROOT)) for file in files} == shown | {*UNSHOWN}
    assert all((ROOT / reader).exists() for reader in UNSHOWN.values())


def test_a_commit_says_whether_a_program_has_changed_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and documents that are written anew are no changes."""

    def git(*words: str) -> None:
        author = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *author, *words], cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.setattr(process, "ROOT", tmp_path)
    commit = process.git_commit.__wrapped__
    documents = ("README.md", "docs/results/p.jsonl", "docs/x.md")
    for file in (*documents, "core.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("one")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "all")
    clean = commit()
    for file in documents:
        (tmp_path / file).write_text("two")
    assert clean and commit() == clean
    (tmp_path / "core.py").write_text("two")
    dirty = commit()
    (tmp_path / "core.py").write_bytes(b"# \xfc")  # which is no UTF-8
    assert dirty.startswith(f"{clean}+") and dirty != commit() != clean


# --- bounds


def test_a_document_says_that_its_rows_had_other_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the code's bounds move, the committed page is not what would be written."""
    page = (ROOT / "docs" / "results.md").read_text()
    assert documents.render_blocks(page) == page
    monkeypatch.setattr(tolerances, "RUN", Tolerance(**vars(tolerances.RUN) | {"bound": 1e-9}))
    assert "gap of the losses, in nats 1e-12, now 1e-09" in documents.render_blocks(page)
