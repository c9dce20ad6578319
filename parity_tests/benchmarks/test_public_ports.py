"""Public ports: each is described, runs against a folder of checkouts, and has a row."""

from pathlib import Path

import pytest

from benchmarks import jobs, run
from benchmarks.public_ports import measure, table
from benchmarks.public_ports.pairs import FAMILIES, PAIRS
from benchmarks.public_ports.programs import FOLDER, Pair, checkout, find
from lockstep import results
from lockstep.errors import UserError
from parity_tests.benchmarks import toy_ports
from parity_tests.tiers import tier

TOY = toy_ports.PAIRS[0]


@pytest.fixture(autouse=True)
def fresh_commits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder of checkouts that is a test's own, and empty."""
    measure.commit.cache_clear()
    monkeypatch.setenv(FOLDER, str(tmp_path))


def test_at_least_forty_pairs_are_described() -> None:
    assert len(PAIRS) >= 40
    assert len(PAIRS) == sum(len(family.PAIRS) for family in FAMILIES)


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_a_pair_names_its_files_and_what_is_known_of_it(pair: Pair) -> None:
    for source in pair.sources:
        owner, slash, name = source.repository.partition("/")
        assert owner and slash and name and source.path.endswith(".py")
    assert pair.sources[0] != pair.sources[1]
    assert all(callable(side) for side in pair.sides) and find(pair.family, pair.name) == pair
    assert pair.own_tests
    assert bool(pair.why) == bool(pair.differs), "what differs has a reason"


def test_without_a_checkout_a_row_says_so(tmp_path: Path) -> None:
    (job,) = measure.jobs([TOY])
    assert job.given["at"] == [measure.ABSENT] * 2
    row, _ = jobs.perform(job, tmp_path / "rows.jsonl")
    assert row["status"] == "no checkout" and toy_ports.PORT in row["why"]
    assert "no checkout" in run.summarise(row)
    with pytest.raises(UserError, match="git clone https://github.com/somebody/original"):
        checkout(toy_ports.ORIGINAL)


@tier("rest", guard="pairs of ours, in check/test_reported_ports.py")
@pytest.mark.parametrize("approximate, verdict", [(True, "different"), (False, "equal")])
def test_a_pair_has_a_row(approximate: bool, verdict: str, tmp_path: Path) -> None:
    toy_ports.make_checkouts(tmp_path, approximate)
    (job,) = measure.jobs([TOY])
    assert all(len(commit) == 40 for commit in job.given["at"])
    row, _ = jobs.perform(job, tmp_path / "rows.jsonl")
    assert row["verdict"] == verdict, row
    assert bool(row["roots"]) == approximate and job.is_finished(row)
    assert all("gelu" not in line for root in row["roots"] for line in root["lines"])
    assert run.summarise(row) == verdict


def test_another_commit_is_measured_anew(tmp_path: Path) -> None:
    toy_ports.make_checkouts(tmp_path, True)
    (job,) = measure.jobs([TOY])
    row = results.row(job.name, "cpu", **job.given)
    assert job.is_finished(row)
    assert not job.is_finished(row | {"at": [row["at"][0], "0" * 40]})


def row_of(pair: Pair, verdict: str) -> results.Row:
    root = {"where": "fc", "direction": "forward", "figure": 2e-5, "cause": "a | b",
            "lines": ["model.py:9", "model.py:6"]}  # fmt: skip
    roots = [root] if verdict == "different" else []
    return {"pair": pair.name, "at": ["a" * 40, "b" * 40], "verdict": verdict, "roots": roots,
            "initial": 0, "uncompared": [], "notes": []}  # fmt: skip


def test_the_table_counts_what_is_missed_and_what_is_called_wrongly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = TOY._replace(name="right", why="", differs=False)
    unseen = TOY._replace(name="unseen", why="", differs=None)
    for pair in (TOY, right, unseen):
        monkeypatch.setitem(PAIRS, pair.name, pair)
    good = [row_of(TOY, "different"), row_of(right, "equal"), row_of(unseen, "equal")]
    text = table.markdown(good)
    assert "Of 3 public pairs, 2 are verified by hand, and 1 of these differ." in text
    assert "called equal: none" in text and "called different: none" in text
    assert f"github.com/{toy_ports.PORT}/blob/{'b' * 40}/model.py" in text
    assert "a \\| b (model.py:9 and model.py:6)" in text and "nobody looked" in text
    ended = {"pair": TOY.name, "at": good[0]["at"], "status": "not supported", "why": "no a_b"}
    assert "| does not run | no a\\_b |" in table.markdown([ended])
    bad = table.markdown([row_of(TOY, "equal"), row_of(right, "different")])
    assert "called equal: toy" in bad and "called different: right" in bad
