"""The ladder where modules have dtypes, formats and gradients of their own, or evaluations do."""

from contextlib import closing
from typing import Any

import pytest

from lockstep.judge.verdict import Verdict
from lockstep.parity import ladder, matrix
from lockstep.parity.case import Case
from lockstep.parity.ladder import RUNGS, WORLDS
from lockstep.parity.pair import GPT
from lockstep.parity.side import Side
from mutants.configs import GRADS
from parity_tests.tiers import tier

Row = dict[str, Any]

# --- `--fp32-islands`

SOME: Row = {"fp32_islands": "blocks.1,head", "remat": "block"}
ALIKE: Row = {"fp32_islands": "*.attend,*.down,head", "model": "gpt2", "remat": "dots",
              "layers": "scan"}  # fmt: skip
# On one rung under the same flags the sound pair stands beside each planted bug: test_power.py.
CLIMBED: dict[str, tuple[Row, int]] = {
    "alike-bf16-3": (ALIKE | {"policy": "bf16"}, 3),
    "some-bf16-3": (SOME | {"policy": "bf16"}, 3),
}

# --- `--formats`. In float64 the twins round the same numbers: not a digit may differ.

EXACT: Row = {
    "policy": "fp64", "formats": "blocks=fp8,head=fp8,*.down=fp32,blocks.1.attn=fp8-delayed",
    "remat": "block", "accum": 1,
}  # fmt: skip
MIXED: Row = {
    "policy": "bf16", "formats": "*=fp8,*.attn=bf16,blocks.0.mlp=fp32,head=fp32",
    "model": "gpt2", "accum": 1,
}  # fmt: skip
DELAYED: Row = {
    "formats": "blocks=fp8-delayed,*.mlp=fp8", "accum": 1, "n_layer": 1, "dropout": 0.0,
}  # fmt: skip
CLIMBED |= {f"formats-fp64-{n}": (EXACT, n) for n in (3, 4, 6)}
CLIMBED |= {"formats-bf16-3": (MIXED, 3), "delayed-3": (DELAYED, 3)}
# On several devices, one layer: scales and amaxes are those of one device.
CLIMBED |= {
    "formats-fp64-fsdp": ({
        "policy": "fp64", "formats": "blocks=fp8,*.mlp=fp8-delayed", "model": "gpt2",
        "remat": "dots", "accum": 2, "mesh": "data=2,fsdp=2",
    }, WORLDS),
}  # fmt: skip
# Over float16, whose gradients have a loss scale.
OVER: Row = {"policy": "fp16", "formats": "blocks=fp8-delayed,*.mlp=fp8", "n_layer": 1}
CLIMBED |= {"scaled-data": (OVER | {"accum": 2, "mesh": "data=2"}, WORLDS)}

# --- a policy's `grads`. Anchored: the derivative written by hand, in the dtype without noise.

NARROW: Row = GRADS | {"accum": 4, "n_layer": 2}
WIDE: Row = {"policy": "params=float64,compute=float64,output=float64,grads=float64",
             "remat": "dots", "model": "gpt2", "accum": 1, "n_layer": 1}  # fmt: skip
CLIMBED |= {f"grads-fp64-{n}": (WIDE, n) for n in (3, 6)}
CLIMBED |= {f"grads-fp16-{n}": (NARROW, n) for n in (5, 8)}
ON_FOUR: Row = {"accum": 2, "mesh": "data=2,fsdp=2", "steps": matrix.MESH_STEPS}
CLIMBED |= {"grads-fp64-fsdp": (WIDE | ON_FOUR, WORLDS)}

# --- `--eval-policy` on several devices: float64 has no noise.

EVALUATED: Row = {"policy": "fp32", "eval_policy": "fp64", "n_layer": 1, "accum": 1}
CLIMBED |= {
    "evaluated-fsdp": (EVALUATED | {"mesh": "data=2,fsdp=2"}, WORLDS),
    "evaluated-scan-fsdp": (EVALUATED | {"mesh": "fsdp=2", "layers": "scan"}, WORLDS),
}


@tier("rest", guard="planted bugs of islands, formats and gradients")
@pytest.mark.parametrize("name", CLIMBED)
def test_the_ladder(name: str, device: str, sides: tuple[Side, Side]) -> None:
    row, number = CLIMBED[name]
    case = Case(pair=GPT, a=sides[0], b=sides[1], config=matrix.config(row, device))
    outcome = ladder.climb(RUNGS[number - 1], case)
    assert outcome.verdict is Verdict.EQUAL, str(outcome.worst)


@tier("rest", guard="the planted bug of a mesh under one policy")
def test_an_evaluation_of_one_rank_is_seen(device: str, sides: tuple[Side, Side]) -> None:
    row, number = CLIMBED["evaluated-scan-fsdp"]
    with closing(sides[1].mutant("evaluated-on-one-rank")) as wrong:
        case = Case(pair=GPT, a=sides[0], b=wrong, config=matrix.config(row, device))
        findings = ladder.climb(RUNGS[number - 1], case).findings
    apart = {finding.rule for finding in findings if finding.verdict is Verdict.DIFFERENT}
    assert apart == {"gap of the evaluations, in nats", "ranks that part"}
