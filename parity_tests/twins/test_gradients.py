"""A policy's `grads`: what it accepts, and that the twins agree."""

import pytest

from lockstep.config.policy import POLICIES, Roles, resolve
from lockstep.errors import UserError
from lockstep.judge.verdict import Verdict
from lockstep.parity import ladder, matrix
from lockstep.parity.case import Case
from lockstep.parity.catalogue import GRADS
from lockstep.parity.ladder import RUNGS, WORLDS
from lockstep.parity.pair import GPT
from lockstep.parity.side import Side
from parity_tests.pair import toy
from parity_tests.tiers import tier


def spec(compute: str, grads: str, param: str = "float32", output: str = "float32") -> str:
    return f"params={param},compute={compute},output={output},grads={grads}"


def test_gradients_in_float16_have_a_loss_scale() -> None:
    assert resolve(spec("float32", "float16")).loss_scaling
    assert not resolve(spec("float32", "bfloat16")).loss_scaling
    assert resolve(spec("float32", "f32")) == Roles(
        param="float32", compute="float32", output="float32", grads="float32"
    )


@pytest.mark.parametrize(
    "policy",
    [
        spec("float32", "float64"),
        spec("float64", "float32", "float64", "float64"),
        spec("bfloat16", "float16", "bfloat16"),
        spec("float32", "float8"),
        "grads=float16",
    ],
)
def test_what_is_refused_is_one_line(policy: str) -> None:
    with pytest.raises(UserError, match="--policy"):
        resolve(policy)


def test_a_module_in_a_format_of_its_own_has_that_policy_s_gradients() -> None:
    config = toy(policy=spec("float32", "float16"), fp32_islands="head", formats="blocks.0=bf16")
    assert config.dtypes.at("head").grads == config.dtypes.at("blocks.0.mlp.up").grads == ""
    assert config.dtypes.at("blocks.1.mlp.up").grads == "float16"
    assert config.dtypes.modules["head"] == POLICIES["fp32"]


NARROW = GRADS | {"accum": 4, "n_layer": 2}
# Anchored: the derivative that is written by hand, in the one dtype without noise.
EXACT = {"policy": spec(*4 * ["float64"]), "remat": "dots", "model": "gpt2", "accum": 1,
         "n_layer": 1}  # fmt: skip
CLIMBED = {f"fp64-{n}": (EXACT, n) for n in (3, 6, 8)}
CLIMBED |= {f"fp16-{n}": (NARROW, n) for n in (3, 5, 7, 8)}
CLIMBED |= {
    "fp64-data-11": (EXACT | {"accum": 2, "mesh": "data=2"}, WORLDS),
    "fp64-fsdp-11": (EXACT | {"accum": 2, "mesh": "data=2,fsdp=2"}, WORLDS),
    "fp16-data-11": (GRADS | {"mesh": "data=2"}, WORLDS),
    "fp16-fsdp-11": (GRADS | {"accum": 2, "model": "gpt2", "mesh": "fsdp=2"}, WORLDS),
}


@tier("rest", guard="rung 3 in fp64", where=lambda row, number: (row, number) != (EXACT, 3))
@pytest.mark.parametrize(("row", "number"), CLIMBED.values(), ids=CLIMBED)
def test_the_ladder_with_gradients_of_their_own(
    row: matrix.Row, number: int, device: str, sides: tuple[Side, Side]
) -> None:
    case = Case(pair=GPT, a=sides[0], b=sides[1], config=matrix.config(row, device))
    outcome = ladder.climb(RUNGS[number - 1], case)
    assert outcome.verdict is Verdict.EQUAL, str(outcome.worst)
