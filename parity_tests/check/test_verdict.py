"""Tests that every finding has a fate, and that the headline says what limits a verdict."""

from typing import Any

import pytest

from lockstep.check import check, judge, report, settle
from lockstep.check.rungs import Spot
from lockstep.check.settle import ECHO, EXCUSED, ROOT
from parity_tests.check.inside import START, check_pair
from parity_tests.check.unsound_programs import BATCH, SGD

TAIL = BATCH + SGD
PLAIN = (
    START
    + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))
"""
    + TAIL
)
SLOPE = ("torch.tanh(self.a(x))", "torch.tanh(1.01 * self.a(x))")
TWINS = (
    START
    + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.left, self.right = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        return self.a(x) + 0 * (self.left(x) + self.right(x)).detach()
"""
    + TAIL
)


def check_plain(*changes: tuple[str, str], **options: Any) -> check.Result:
    return check_pair(PLAIN, PLAIN, *changes, again=False, **options)


def test_each_finding_has_a_fate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward root, its echoes, and no finding else."""
    seen: list[dict[Spot, settle.Fate]] = []

    def keeps(*given: Any) -> dict[Spot, settle.Fate]:
        seen.append(settle.settle(*given))
        return seen[-1]

    monkeypatch.setattr(judge, "settle", keeps)
    (root,) = check_plain(SLOPE).roots
    kinds = {spot: fate.kind for spot, fate in seen[0].items()}
    assert {kinds[spot] for spot in root.spots} == {ROOT}
    ends = {fate.kind for spot, fate in seen[0].items() if spot.is_end}
    assert ends == {ECHO} and {fate.of for fate in seen[0].values() if fate.kind == ECHO} == {
        root.where
    }


def test_a_dropped_finding_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The assertion before the verdict fails where a finding has no fate."""

    def forgets(*given: Any) -> dict[Spot, settle.Fate]:
        found = settle.settle(*given)
        return dict(list(found.items())[:-1])

    monkeypatch.setattr(judge, "settle", forgets)
    with pytest.raises(AssertionError, match="findings without a root, an echo or an excuse"):
        check_plain(SLOPE)


def test_a_root_that_cannot_cause_an_end_leaves_it_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate that is another is no echo of a forward root."""
    result = check_plain(SLOPE, ("lr=0.05", "lr=0.06"))
    assert [root.direction for root in result.roots] == ["forward", "update"]


def test_an_excuse_has_its_residual() -> None:
    frozen = PLAIN.replace("SGD(model.parameters()", "SGD(model.b.parameters()")
    stops = ("torch.tanh(self.a(x))", "torch.tanh(self.a(x)).detach()")
    result = check_pair(frozen.replace(*stops), frozen, again=False)
    assert result.verdict == "equal" and [each.name for each in result.excused] == [
        "frozen by the optimizer"
    ]
    assert all(each.residual <= each.bound for each in result.excused)
    told = report.to_json(result)["excused"]
    assert told[0]["findings"] == len(result.excused[0].spots) > 0
    assert EXCUSED in {fate.kind for fate in settle.settle(
        result.rungs, [], {s: each.name for each in result.excused for s in each.spots}
    ).values()}  # fmt: skip


@pytest.mark.parametrize(("names", "verdict"), [
    (("left", "right"), "equal"), (("one", "other"), "incomplete"),
])  # fmt: skip
def test_tensors_that_nothing_tells_apart_are_asked_for(
    names: tuple[str, str], verdict: str
) -> None:
    """No gradient arrives at two of one shape: their paths tell them, or the user does."""
    port = TWINS.replace("left", names[0]).replace("right", names[1])
    result = check_pair(TWINS, port, again=False)
    assert result.verdict == verdict, [root.name for root in result.roots]
    assert ("--map MAP" in report.headline(result)) == (verdict == "incomplete")
    assert bool(result.undecided) == (verdict == "incomplete")


def test_what_names_alone_have_paired_is_said() -> None:
    """One that gets no gradient has the only partner of its shape; behind a difference all are
    guesses that no value confirms."""
    alone = (
        TWINS.replace(", self.right", "")
        .replace(", nn.Linear(6, 3)\n", "\n")
        .replace("(self.left(x) + self.right(x))", "self.left(x)")
    )
    result = check_pair(alone, alone.replace("left", "other"), again=False)
    assert result.verdict == "equal"
    said = "paired by names alone (2): left.bias, left.weight"
    assert said in report.headline(result).replace("left.weight, left.bias", said[-22:])


def test_the_headline_says_how_far_an_optimizer_was_seen() -> None:
    assert report.headline(check_plain()) == (
        "EQUAL: torch port of ref.py, 11 rungs; not compared: what comes after 4 batches and 16 "
        "updates"
    )


def test_values_that_pair_against_names_are_told() -> None:
    """w1 and w2 are k2 and k1 in the port: converted by name, its weights are another model's."""
    gated = PLAIN.replace(
        "self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)",
        "self.w1, self.w2, self.b = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)",
    )
    gated = gated.replace("torch.tanh(self.a(x))", "torch.tanh(self.w1(x)) * self.w2(x)")
    straight = gated.replace("w1", "k1").replace("w2", "k2")
    across = gated.replace("w1", "k2").replace("w2", "k1")
    assert not check_pair(gated, straight, again=False).crossed
    result = check_pair(gated, across, again=False)
    assert result.verdict == "equal"
    assert "paired against their names (4): w1.weight with k2.weight" in report.headline(result)


def test_an_output_in_another_order_of_axes_is_told() -> None:
    turned = ("self.b(torch.tanh(self.a(x)))", "self.b(torch.tanh(self.a(x))).T")
    result = check_plain(turned, ('model(batch["x"])', 'model(batch["x"]).T'))
    assert result.verdict == "equal"
    assert "axes of outputs in another order (1): output (3, 8) for (8, 3)" in report.headline(
        result
    )
