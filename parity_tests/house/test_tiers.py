"""A tier stands at its test, with its guard; a mark that is wrong stops the suite."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from parity_tests import conftest, kept, tiers
from parity_tests.tiers import tier

pytestmark = tier("quick", guard="house rules")

FP32 = tier("rest", guard="float64", where=lambda policy: policy == "fp32")
REPEATED = tier("full", guard="tiny", where=lambda policy, model: model == "gpt2")


def item(*marks: pytest.MarkDecorator, name: str = "test_it", **params: Any) -> Any:
    return SimpleNamespace(
        nodeid=f"room/{name}[{'-'.join(params.values())}]",
        path=Path(__file__),
        callspec=SimpleNamespace(params=params),
        iter_markers=lambda _: iter([decorator.mark for decorator in marks]),
    )


def config(*arguments: str, **options: bool) -> Any:
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    getoption = {"--quick": False, "--rest": False, **{f"--{k}": v for k, v in options.items()}}.get
    return SimpleNamespace(args=[*arguments], getoption=getoption, hook=hook)


def case(policy: str, model: str = "tiny") -> Any:
    return item(FP32, REPEATED, policy=policy, model=model)


def test_a_mark_is_of_the_cases_that_its_predicate_chooses() -> None:
    plain, other, both = case("fp64"), case("fp32"), case("fp32", "gpt2")
    quick = item(tier("quick", guard="a rule"))
    found = tiers.split([plain, other, both, quick])
    assert found == {"quick": [quick], "test": [plain], "rest": [other], "full": [both]}


@pytest.mark.parametrize(
    ("options", "left"),
    [({}, [0, 3]), ({"quick": True}, [3]), ({"rest": True}, [1])],
    ids=["make test", "make quick", "make test-rest"],
)
def test_a_command_runs_its_tiers(options: dict[str, bool], left: list[int]) -> None:
    items = [case("fp64"), case("fp32"), case("fp32", "gpt2"), item(tier("quick", guard="a rule"))]
    chosen = [*items]
    tiers.select(config("parity_tests", **options), chosen)
    assert chosen == [items[i] for i in left]


def test_a_test_that_is_named_runs_in_any_tier() -> None:
    items = [case("fp32")]
    tiers.select(config("parity_tests/test_it.py::test_it"), items)
    assert len(items) == 1


@pytest.mark.parametrize(
    ("mark", "said"),
    [
        (pytest.mark.tier("rest"), "names no guard"),
        (pytest.mark.tier("rest", guard=" "), "names no guard"),
        (pytest.mark.tier("test", guard="it"), "no tier to mark"),
        (pytest.mark.tier("slow", guard="it"), "no tier to mark"),
        (pytest.mark.tier(guard="it"), "no tier to mark"),
        (tier("rest", guard="it", where=lambda family: True), "asks for 'family'"),
        (tier("rest", guard="it", where=lambda policy: policy == "fp7"), "matches nothing"),
    ],
)
def test_a_wrong_mark_stops_the_suite(mark: pytest.MarkDecorator, said: str) -> None:
    with pytest.raises(pytest.UsageError, match=said):
        tiers.select(config("parity_tests"), [item(mark, policy="fp64")])


def test_a_mark_that_another_hides_matches_nothing() -> None:
    hidden, hiding = tier("rest", guard="float64"), tier("full", guard="tiny")
    assert tiers.idle([item(hidden, hiding)]) == ["room/test_it: rest (float64)"]
    assert tiers.idle([item(hidden, hiding), item(hidden, name="test_more")]) == []


def test_make_quick_finds_its_files_by_their_text(tmp_path: Path) -> None:
    assert tiers.may_be_quick('@tier(\n    "quick",') and not tiers.may_be_quick('tier("rest"')
    items = [item(tier("quick", guard="a rule"))]
    items[0].path = tmp_path / "test_it.py"
    items[0].path.write_text("made = tier(NAME)")
    with pytest.raises(pytest.UsageError, match="in the file itself"):
        tiers.select(config("parity_tests"), items)


# --- the programs that are kept

CPU = "model name\t: A\nflags\t\t: avx2 amx\ncpu MHz\t\t: 2000.1\nmodel name\t: A\n"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(os, "environ", {**os.environ, "LOCKSTEP_CACHE": str(tmp_path)})
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
    return tmp_path


def test_a_folder_is_of_one_jaxlib_cpu_and_number_of_threads(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = kept.describe_cpu(CPU)
    assert cpu == kept.describe_cpu(CPU.replace("2000.1", "3000.2"))
    folders = {kept.kept_folder(kept.describe_cpu(CPU.replace(*change)), "1")
               for change in (("", ""), (": A", ": B"), (" amx", ""))}  # fmt: skip
    folders.add(kept.kept_folder(cpu, "2"))
    monkeypatch.setattr(kept.metadata, "version", lambda package: "0.99.9")
    folders.add(kept.kept_folder(cpu, "1"))
    assert len(folders) == 5
    assert {folder.parent for folder in folders} == {cache / "tests"}
    assert sum("0.99.9" in folder.name for folder in folders) == 1


def test_programs_are_kept_unless_all_is_to_be_compiled_anew(cache: Path) -> None:
    conftest._share_programs(fresh=False)
    named = os.environ["JAX_COMPILATION_CACHE_DIR"]
    assert Path(named).is_dir() and Path(named).parent == cache / "tests"
    os.environ["JAX_COMPILATION_CACHE_DIR"] = "mine"
    conftest._share_programs(fresh=False)
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == "mine"
    conftest._share_programs(fresh=True)
    fresh = Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    assert cache not in fresh.parents and [*fresh.iterdir()] == []


def test_where_nothing_can_be_kept_the_suite_runs(cache: Path) -> None:
    (cache / "tests").write_text("a file")
    conftest._share_programs(fresh=False)
    assert Path(os.environ["JAX_COMPILATION_CACHE_DIR"]).is_dir()


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    for age, name in enumerate(("a/old", "b/read", "a/new")):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(10))
        os.utime(path, (100 if name == "b/read" else age, age))
    kept.trim(tmp_path, 30)
    assert len([*tmp_path.glob("*/*")]) == 3
    kept.trim(tmp_path, 15)
    assert [path.name for path in tmp_path.glob("*/*")] == ["read"]
