"""Rows of results: kept by name and device, with where they come from; when they are stale."""

import json
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from evidence import bounds, status, tables
from evidence.parts import PARTS, Part
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
    assert set(found) == results.MEASURED and found["seconds"] == 1.5
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


def test_every_committed_row_has_its_origin_and_its_part() -> None:
    files = [path for path in committed_files() if path.is_file()]
    assert {path.suffix for path in files} == {".jsonl"}
    assert all(results.read(file) for file in files)
    assert {str(file.relative_to(ROOT)) for file in files} == {part.file for part in PARTS}


# --- staleness


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], str]]:
    """A repository of its own; writes a file, commits it, and returns the commit."""

    def git(*words: str) -> str:
        author = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        done = subprocess.run(["git", *author, *words], cwd=tmp_path, check=True,
                              capture_output=True, text=True)  # fmt: skip
        return done.stdout.strip()

    def commit(file: str, text: str) -> str:
        forget()
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
        git("add", ".")
        git("commit", "-q", "-m", text)
        return git("rev-parse", "--short", "HEAD")

    def forget() -> None:
        process.git_commit.cache_clear()
        provenance.changed_files.cache_clear()

    git("init", "-q")
    monkeypatch.setattr(process, "ROOT", tmp_path)
    forget()
    yield commit
    forget()


def row(commit: str | None, name: str = "a") -> results.Row:
    found = results.row(name, "cpu")
    return {**found, "measured": found["measured"] | {"commit": commit}}


def part(file: Path, *paths: str) -> Part:
    return Part(name="p", file=str(file), command="", units=lambda: ["a"], paths=paths)


def test_a_row_is_stale_when_what_it_depends_on_has_changed(
    house: Callable[[str, str], str], tmp_path: Path
) -> None:
    file = tmp_path / "docs" / "results" / "p.jsonl"
    first = house("core/a.py", "one")
    house("docs/results/p.jsonl", "{}")
    results_of = [row(first)]
    file.write_text(json.dumps(results_of[0]) + "\n")
    house("docs/x.md", "a page")
    assert part(file, "core").unfinished() == []
    assert status.age(part(file, "core"), results_of) == "2 commits ago; current"
    house("core/a.py", "two")
    assert part(file, "core").unfinished() == ["a"]
    said = status.age(part(file, "core"), results_of)
    assert said == "3 commits ago; 1 of 1 rows stale: core/a.py changed since"
    assert part(file, "other").unfinished() == []


def test_uncommitted_changes_count(house: Callable[[str, str], str], tmp_path: Path) -> None:
    first = house("core/a.py", "one")
    (tmp_path / "core" / "a.py").write_text("two")
    assert provenance.changed_files(first, ("core",)) == ("core/a.py",)
    dirty = process.git_commit()
    assert dirty and dirty.startswith(f"{first}+")
    assert provenance.is_current(row(dirty)["measured"], ("core",))
    process.git_commit.cache_clear()
    (tmp_path / "core" / "a.py").write_bytes(b"# \xfc")  # which is no UTF-8
    assert not provenance.is_current(row(dirty)["measured"], ("core",))


def test_tables_made_anew_change_no_program(
    house: Callable[[str, str], str], tmp_path: Path
) -> None:
    """One measurement after another needs no commit between them."""
    house("README.md", "a table")
    house("docs/results/p.jsonl", "{}")
    commit = house("docs/x.md", "a table")
    for path in ("README.md", "docs/x.md", "docs/results/p.jsonl"):
        (tmp_path / path).write_text("another")
    assert process.git_commit() == commit


def test_a_commit_that_nobody_knows_is_said(
    house: Callable[[str, str], str], tmp_path: Path
) -> None:
    first = house("core/a.py", "one")
    for commit in (None, "0123abc", f"{first}+12345678"):
        assert provenance.changed_files(commit, ("core",)) is None
        assert "1 of 1 rows at a commit that is not known" in status.age(
            part(tmp_path, "core"), [row(commit)]
        )


def test_other_libraries_or_another_cpu_measure_again() -> None:
    today = results.row("a", "cpu")["measured"]
    assert provenance.is_current(today, ())
    for name, other in (("python", "2.7"), ("versions", {}), ("cpu", {}), ("commit", None)):
        assert not provenance.is_current(today | {name: other}, ("lockstep",)), name


# --- bounds


def judged_row(rule: str, bound: float, policy: str = "fp64") -> dict[str, Any]:
    return {"name": rule, "policy": policy, "worst": {"rule": rule, "bound": bound, "figure": 0.0}}


def test_todays_bounds_are_not_remarked_on() -> None:
    same = [
        judged_row("relative gap", tolerances.NORM.bound),
        judged_row("a check that allows nothing", 0),
    ]
    assert bounds.remark(same) == ""


def test_another_bound_is(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [judged_row("relative gap", tolerances.NORM.bound), judged_row("of no constant", 123.0)]
    assert "1 of 2 rows** (of no constant 123, now" in bounds.remark(rows)
    monkeypatch.setattr(tolerances, "NORM", Tolerance(**vars(tolerances.NORM) | {"bound": 1e-9}))
    assert "2 of 2 rows** (relative gap 1e-12, now 1e-09;" in bounds.remark(rows)


def test_a_document_says_that_its_rows_had_other_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as the code's bounds move, the committed page is not what would be written."""
    page = (ROOT / "docs" / "results.md").read_text()
    assert tables.render_blocks(page) == page
    monkeypatch.setattr(tolerances, "CURVE", Tolerance(**vars(tolerances.CURVE) | {"bound": 1e-9}))
    assert "gap of the losses, in nats 1e-12, now 1e-09" in tables.render_blocks(page)
    assert "gap of the losses, in nats 1e-12, now 1e-09" in "".join(status.lines(PARTS[:1]))
