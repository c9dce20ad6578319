"""`--fp32-islands auto`: the greedy choice, what is measured of it, and a run that keeps it."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli.trainers import train
from lockstep.config import Config, islands
from lockstep.errors import UserError
from lockstep.parity import sensitivity
from lockstep.parity.greedy_islands import _choose, shorten
from lockstep.parity.pair import GPT
from lockstep.parity.side import Side
from lockstep.process import ONE_THREAD
from lockstep.run import directory
from parity_tests.pair import toy
from parity_tests.tiers import tier

CONFIG = toy(n_layer=2, policy="bf16")
SQUARED = {"blocks.0.mlp.up": 0.44, "blocks.1.mlp.up": 0.09, "head": 0.36}  # of 1; of others 0.01
TIMES = {"blocks.*.mlp.up": 0.06, "head": 0.02}  # of others 0.12


def made_up_times(slower: float = 0.0) -> Callable[..., dict[str, float]]:
    """Times of steps that add up; `slower`: what several islands take beside their sum."""

    def times(side: Side, case: Any, config: Config, patterns: list[str]) -> dict[str, float]:
        names, kinds = config.model.matmuls, islands.by_kind(config.model.matmuls)
        found = {}
        for pattern in patterns:
            chosen = [name for name in names if islands.match(pattern, name)]
            each = ((TIMES.get(k, 0.12) / len(kinds[k])) for k in map(islands.kind, chosen))
            found[pattern] = 1 + sum(each) + slower * ("," in pattern)
        return found

    return times


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Choose by squared errors and times that are made up and add up."""

    def error_of(side: Side, case: Any) -> Callable[[list[str]], dict[str, float]]:
        def error(wide: list[str]) -> dict[str, float]:
            return {"gradient": (1 - sum(SQUARED.get(name, 0.01) for name in wide)) ** 0.5}

        return error

    def chosen(slower: float = 0.0, **goal: float) -> str:
        monkeypatch.setattr(sensitivity, "times", made_up_times(slower))
        side = Side("torch", "no.such.module")
        return _choose(side, CONFIG, goal.get("budget", 0), goal.get("error", 0))

    monkeypatch.setattr(sensitivity, "error_of", error_of)
    monkeypatch.setattr(sensitivity, "strict_case", lambda *_: None)
    return chosen


def test_what_removes_most_for_its_time_comes_first(choose: Callable[..., str]) -> None:
    """A budget is spent, and what does not fit is passed over."""
    assert choose(budget=0.025) == "head"
    assert choose(budget=0.04) == "head"  # the first layer's `up` would make it 0.05
    assert choose(budget=0.055) == "blocks.0.mlp.up,head"
    assert choose(budget=0.085) == "blocks.*.mlp.up,head"
    assert choose(budget=0.01) == ""


def test_islands_that_take_longer_than_their_sum_are_given_up(choose: Callable[..., str]) -> None:
    assert choose(budget=0.055, slower=0.1) == "head"


def test_islands_are_added_until_an_error_is_reached(choose: Callable[..., str]) -> None:
    assert choose(error=1.5) == ""
    assert choose(error=0.9) == "head"
    assert choose(error=0.5) == "blocks.0.mlp.up,head"
    with pytest.raises(UserError, match="--error 0.01: is not reached; with all .* it is 1.0e-01"):
        choose(error=0.01)


def test_a_whole_kind_is_one_pattern() -> None:
    modules = CONFIG.model.matmuls
    chosen = ["blocks.0.mlp.up", "blocks.1.mlp.up", "head", "blocks.1.attn.qkv"]
    short = shorten(chosen, modules)
    assert short == "blocks.*.mlp.up,blocks.1.attn.qkv,head"
    assert [name for name in modules if islands.match(short, name)] == sorted(
        chosen, key=modules.index
    )
    assert shorten([], modules) == ""


@tier("rest", guard="the greedy choice of islands, measured")
def test_no_kind_within_the_budget_is_better(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors are measured; times are made up, since measured ones are not the same twice."""
    monkeypatch.setattr(sensitivity, "times", made_up_times())
    with closing(
        Side("torch", GPT.modules["torch"], remember=False, environment=ONE_THREAD)
    ) as side:
        chosen = _choose(side, CONFIG, 0.07, 0.0)
        case = sensitivity.strict_case(side, side, CONFIG)
        error = sensitivity.error_of(side, case)
        wide = [name for name in CONFIG.model.matmuls if islands.match(chosen, name)]
        kinds = islands.by_kind(CONFIG.model.matmuls)
        fitting = [kinds[kind] for kind, time in TIMES.items() if time <= 0.07]
        assert error(wide)["gradient"] <= min(error(group)["gradient"] for group in fitting)
        assert error(wide)["gradient"] < error([])["gradient"]


@tier("rest", guard="the greedy choice of islands, measured")
def test_a_run_keeps_what_was_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One layer in torch: an error that some islands reach, and not all; and a resumed run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text(1000 * "the quick brown fox ")
    shape = "--n-layer 1 --d-model 32 --n-head 2 --context 32 --batch-size 2 --eval-every 0"
    flags = ["--data", "a.txt", "--device", "cpu", "--out", "run", *shape.split()]
    asked = ["--steps", "4", "--fp32-islands", "auto", "--error", "3e-3"]
    assert train("torch", [*flags, *asked]) == 0
    chosen = directory.read_record(Path("run")).config.precision.fp32_islands
    assert chosen and chosen != "auto"
    assert f"--fp32-islands {chosen}: error of the gradient" in capsys.readouterr().out
    assert len(toy(n_layer=1, fp32_islands=chosen).dtypes.modules) == 7
    assert train("torch", ["--out", "run", "--resume", "--steps", "5"]) == 0
    assert directory.read_record(Path("run")).config.precision.fp32_islands == chosen
