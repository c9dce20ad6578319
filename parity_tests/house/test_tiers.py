"""A tier stands at its test, with its guard; a mark that is wrong stops the suite."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from parity_tests import tiers
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
