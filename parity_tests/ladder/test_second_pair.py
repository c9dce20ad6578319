"""The rungs name neither our frameworks' twins nor our model: a conv net climbs them unedited."""

from collections.abc import Iterator
from itertools import product

import pytest

from lockstep.config import from_flags
from lockstep.judge.verdict import Verdict
from lockstep.parity import ladder
from lockstep.parity.case import Case
from lockstep.parity.side import Side
from parity_tests.ladder.conv import CONV
from parity_tests.tiers import tier

RUNGS = {rung.number: rung for rung in ladder.RUNGS}
Sides = dict[str, Side]


@pytest.fixture(scope="module")
def sides() -> Iterator[Sides]:
    sides = {framework: Side(framework, module) for framework, module in CONV.modules.items()}
    yield sides
    for side in sides.values():
        side.close()


@pytest.fixture
def planted(request: pytest.FixtureRequest) -> Iterator[Sides]:
    """Frameworks with a bug: `request.param` is framework -> variant."""
    sides = {f: Side(f, CONV.modules[f], variant=v) for f, v in request.param.items()}
    yield sides
    for side in sides.values():
        side.close()


def climb(number: int, policy: str, a: Side, b: Side) -> ladder.Outcome:
    flags = {
        "model": "tiny", "context": 64, "vocab": 256, "batch_size": 2, "accum": 4, "steps": 20,
        "lr": 1e-3, "clip": 0.5, "numerics": "strict", "remat": "none",
        "device": "cpu", "policy": policy,
    }  # fmt: skip
    config = from_flags(flags, accelerator=False)
    return ladder.climb(RUNGS[number], Case(pair=CONV, a=a, b=b, config=config))


@tier("rest", guard="the ladder of the first")
@pytest.mark.parametrize(
    ("number", "policy"),
    [*product([2, 3, 4, 5, 8], ["fp64"]), (3, "bf16")],
    ids=lambda value: RUNGS[value].name if isinstance(value, int) else value,
)
def test_the_second_pair_climbs(number: int, policy: str, sides: Sides) -> None:
    outcome = climb(number, policy, sides["jax"], sides["torch"])
    assert outcome.verdict is Verdict.EQUAL, str(outcome.worst)


@tier("rest", guard="the ladder of the first")
@pytest.mark.parametrize(
    "planted", [dict.fromkeys(CONV.modules, "ordinary-batch-norm")], indirect=True, ids=["both"]
)
def test_ordinary_batch_norm_is_no_sum_of_micro_batches(planted: Sides) -> None:
    """The two sides agree, and neither is what it is in one batch."""
    outcome = climb(5, "fp64", planted["jax"], planted["torch"])
    different = {f.where.split(":")[0] for f in outcome.findings if f.verdict is Verdict.DIFFERENT}
    assert different == {side.name for side in planted.values()}


@tier("rest", guard="the ladder of the first")
@pytest.mark.parametrize(
    "planted, number, tensor",
    [
        ({"torch": "other-epsilon"}, 2, "bn1"),
        ({"torch": "other-momentum"}, 4, "bn1.running_mean"),
        ({"jax": "biased-running-variance"}, 4, "bn1.running_var"),
    ],
    indirect=["planted"],
    ids=["other-epsilon", "other-momentum", "biased-running-variance"],
)
def test_a_bug_in_one_side_is_called_different(
    planted: Sides, number: int, tensor: str, sides: Sides
) -> None:
    """And the first tensor so called is the one in which the bug shows first."""
    ((framework, side),) = planted.items()
    (sound,) = (other for name, other in sides.items() if name != framework)
    outcome = climb(number, "fp64", sound, side)
    different = [finding for finding in outcome.findings if finding.verdict is Verdict.DIFFERENT]
    assert different and different[0].where.split()[-1] == tensor
