"""The ladder where modules have dtypes, formats and gradients of their own."""

from typing import Any

import pytest

from lockstep.judge.verdict import Verdict
from lockstep.parity import ladder, matrix
from lockstep.parity.case import Case
from lockstep.parity.catalogue import GRADS
from lockstep.parity.ladder import RUNGS, WORLDS
from lockstep.parity.pair import GPT
from lockstep.parity.side import Side
from parity_tests.tiers import tier

Row = dict[str, Any]

# --- `--fp32-islands`

SOME: Row = {"fp32_islands": "blocks.1,head", "remat": "block"}
ALIKE: Row = {"fp32_islands": "*.attend,*.down,head", "model": "gpt2", "remat": "dots",
              "layers": "scan"}  # fmt: skip
CLIMBED: dict[str, tuple[Row, int]] = {
    f"alike-{policy}-{n}": (ALIKE | {"policy": policy}, n)
    for policy in ("fp64", "bf16")
    for n in (2, 3)
}
CLIMBED |= {f"some-{policy}-3": (SOME | {"policy": policy}, 3) for policy in ("fp64", "bf16")}
CLIMBED |= {"alike-fp64-8": (ALIKE | {"policy": "fp64"}, 8)}

# --- `--formats`. In float64 the twins round the same numbers: not a digit may differ.

EXACT: Row = {
    "policy": "fp64", "formats": "blocks=fp8,head=mxfp8,*.down=fp32,blocks.1.attn=nvfp4",
    "remat": "block", "accum": 1,
}  # fmt: skip
MIXED: Row = {
    "policy": "bf16", "formats": "*=fp8-rowwise,*.attn=bf16,blocks.0.mlp=fp32,head=fp32",
    "model": "gpt2", "accum": 1,
}  # fmt: skip
DELAYED: Row = {
    "formats": "blocks=fp8-delayed,*.mlp=mxfp8", "accum": 1, "n_layer": 1, "dropout": 0.0,
}  # fmt: skip
CLIMBED |= {f"formats-fp64-{n}": (EXACT, n) for n in (2, 3, 4, 6, 8)}
CLIMBED |= {f"formats-bf16-{n}": (MIXED, n) for n in (3, 8)}
CLIMBED |= {f"delayed-{n}": (DELAYED, n) for n in (3, 8)}
# On several devices, one layer: scales, amaxes and draws are those of one device.
CLIMBED |= {
    "formats-fp64-data": ({
        "policy": "fp64", "formats": "blocks=fp8-delayed,*.mlp=mxfp8,head=fp8",
        "remat": "block", "accum": 2, "mesh": "data=2",
    }, WORLDS),
    "formats-fp64-fsdp": ({
        "policy": "fp64", "formats": "blocks=fp8-rowwise,*.mlp=nvfp4,head=fp8", "model": "gpt2",
        "remat": "dots", "accum": 2, "mesh": "data=2,fsdp=2",
    }, WORLDS),
    "formats-bf16-fsdp": ({
        "policy": "bf16", "formats": "blocks=fp8,*.mlp=fp8-rowwise", "accum": 1, "mesh": "fsdp=2",
    }, WORLDS),
}  # fmt: skip
# Over float16, whose gradients have a loss scale.
OVER: Row = {"policy": "fp16", "formats": "blocks=fp8-delayed,*.mlp=mxfp8", "n_layer": 1}
CLIMBED |= {
    f"scaled-{n}": (OVER | {"accum": accum}, n)
    for n, accum in ((1, 1), (3, 1), (4, 2), (7, 2), (8, 1))
}
CLIMBED |= {"scaled-data": (OVER | {"accum": 2, "mesh": "data=2"}, WORLDS)}

# --- a policy's `grads`. Anchored: the derivative written by hand, in the dtype without noise.

NARROW: Row = GRADS | {"accum": 4, "n_layer": 2}
WIDE: Row = {"policy": "params=float64,compute=float64,output=float64,grads=float64",
             "remat": "dots", "model": "gpt2", "accum": 1, "n_layer": 1}  # fmt: skip
CLIMBED |= {f"grads-fp64-{n}": (WIDE, n) for n in (3, 6, 8)}
CLIMBED |= {f"grads-fp16-{n}": (NARROW, n) for n in (3, 5, 7, 8)}
CLIMBED |= {
    "grads-fp64-data": (WIDE | {"accum": 2, "mesh": "data=2"}, WORLDS),
    "grads-fp64-fsdp": (WIDE | {"accum": 2, "mesh": "data=2,fsdp=2"}, WORLDS),
    "grads-fp16-data": (GRADS | {"mesh": "data=2"}, WORLDS),
    "grads-fp16-fsdp": (GRADS | {"accum": 2, "model": "gpt2", "mesh": "fsdp=2"}, WORLDS),
}
DEFAULT = {"grads-fp64-3"}
# Another rung of the row, its other policy or its other mesh shows each of these.
REPEATS = {
    "alike-fp64-2", "alike-bf16-2", "alike-fp64-3", "alike-fp64-8", "some-fp64-3",
    "formats-fp64-2", "formats-fp64-8", "formats-bf16-8", "delayed-8", "formats-fp64-data",
    "formats-bf16-fsdp", "scaled-1", "scaled-3", "scaled-8", "grads-fp64-8", "grads-fp64-data",
    "grads-fp16-7", "grads-fp16-fsdp",
}  # fmt: skip


@tier(
    "rest",
    guard="planted bugs of islands, formats and gradients",
    where=lambda name: name not in DEFAULT,
)
@tier("full", guard="the row on another rung or mesh", where=lambda name: name in REPEATS)
@pytest.mark.parametrize("name", CLIMBED)
def test_the_ladder(name: str, device: str, sides: tuple[Side, Side]) -> None:
    row, number = CLIMBED[name]
    case = Case(pair=GPT, a=sides[0], b=sides[1], config=matrix.config(row, device))
    outcome = ladder.climb(RUNGS[number - 1], case)
    assert outcome.verdict is Verdict.EQUAL, str(outcome.worst)
