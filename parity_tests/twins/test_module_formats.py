"""`--formats`: which modules a pattern gives which format, and that the twins agree."""

from typing import Any

import pytest
import torch.nn.functional

import jax_impl.extra.cpu
import jax_impl.extra.rules
import jax_impl.functional
import torch_ref.extra.onednn
import torch_ref.extra.rules
from lockstep.config import Config
from lockstep.config.policy import POLICIES
from lockstep.devices import Capabilities
from lockstep.judge.verdict import Verdict
from lockstep.model.stacked import scans_layers
from lockstep.parity import ladder, matrix
from lockstep.parity.case import Case
from lockstep.parity.ladder import RUNGS, WORLDS
from lockstep.parity.pair import GPT
from lockstep.parity.side import Side
from parity_tests.pair import toy
from parity_tests.tiers import tier

FORMATS = "blocks=fp8,head=mxfp8,*.mlp=bf16,blocks.1.attn=nvfp4,*.down=fp32"


def formats_of(policy: str, formats: str, **flags: Any) -> dict[str, str]:
    """Module -> its recipe, or what it computes in."""
    dtypes = toy(n_layer=2, policy=policy, formats=formats, **flags).dtypes
    at = {name: dtypes.at(name) for name in dtypes.modules}
    return {name: own.recipe or own.compute for name, own in at.items()}


def test_the_last_pattern_that_fits_counts_and_islands_after_it() -> None:
    found = formats_of("bf16", FORMATS, fp32_islands="blocks.0.attn.qkv")
    assert found == {
        "blocks.0.attn.qkv": "float32",
        "blocks.0.attn.attend": "bfloat16",  # a recipe is for linear layers
        "blocks.0.attn.proj": "fp8",
        "blocks.1.attn.qkv": "nvfp4",
        "blocks.1.attn.attend": "bfloat16",
        "blocks.1.attn.proj": "nvfp4",
        **{f"blocks.{i}.mlp.{name}": "bfloat16" for i in range(2) for name in ("gate", "up")},
        **{f"blocks.{i}.mlp.down": "float32" for i in range(2)},
        "head": "mxfp8",
    }


def test_in_float64_rounding_alone_is_left() -> None:
    found = formats_of("fp64", FORMATS)
    assert {*found.values()} == {"float64", "fp8", "mxfp8", "nvfp4"}
    dtypes = toy(policy="fp64", formats=FORMATS).dtypes
    assert {own.compute for own in dtypes.modules.values()} == {"float64"}


def test_a_module_in_the_policy_s_own_format_is_any_other() -> None:
    """It has the product that most modules have, a CPU's library here; others have their own."""
    device = Capabilities(platform="cpu", libraries=frozenset(["bfloat16", "float32"]))
    names = "blocks.0.attn.qkv", "head"
    config = toy(policy="bf16", formats="*=bf16,head=fp32", numerics="fast")
    rules: Any = jax_impl.extra.rules.Rules(config, config.dtypes, device, remat="none")
    usual, own = (rules.product(config.dtypes.at(name)) for name in names)
    assert (usual, own) == (jax_impl.extra.cpu.linear, jax_impl.functional.linear)
    config = toy(policy="fp32", formats="*=fp32,head=bf16", numerics="fast")
    rules = torch_ref.extra.rules.Rules(config, config.dtypes, device)
    usual, own = (rules.linear(name, 8, 8, bias=False).product for name in names)
    assert usual is torch_ref.extra.onednn.linear
    x, weight = torch.ones(8, 8), torch.full((8, 8), 1 + 2.0**-9)
    assert torch.equal(own(x, weight, None), torch.full((8, 8), 8.0, dtype=torch.bfloat16))


def test_what_a_recipe_leaves_out_can_be_asked_for() -> None:
    config = toy(n_layer=3, policy="fp8", formats="head=fp8,blocks.1=bf16")
    assert config.dtypes.modules["head"].recipe == "fp8"
    assert config.dtypes.modules["blocks.1.mlp.up"] == POLICIES["bf16"]
    assert config.dtypes.modules["blocks.2.mlp.up"] == POLICIES["fp32"]


def test_an_evaluation_under_a_policy_of_its_own_has_no_other_formats() -> None:
    config = toy(policy="bf16", formats="blocks.0=fp8", eval_policy="fp32")
    assert {own.recipe for own in config.eval_dtypes.modules.values()} == {""}
    assert config.replace(eval_policy="").eval_dtypes == config.replace(eval_policy="").dtypes


def test_layers_that_differ_are_unrolled() -> None:
    deep: dict[str, Any] = {"n_layer": 24, "policy": "bf16"}
    assert scans_layers(toy(**deep, formats="*.down=fp32"))
    for formats in ("blocks.0=fp32", "blocks=fp32,blocks.23=bf16", "blocks=fp8"):
        assert not scans_layers(toy(**deep, formats=formats))


def test_a_recorded_config_reads_as_it_was_written() -> None:
    config = toy(policy="bf16", formats=FORMATS)
    assert Config.from_json(config.to_json()) == config


Row = dict[str, Any]
# Anchored: in float64 the twins round the same numbers, so that not a digit may differ.
EXACT: Row = {
    "policy": "fp64", "formats": "blocks=fp8,head=mxfp8,*.down=fp32,blocks.1.attn=nvfp4",
    "remat": "block", "accum": 1,
}  # fmt: skip
MIXED: Row = {
    "policy": "bf16", "formats": "*=fp8-rowwise,*.attn=bf16,blocks.0.mlp=fp32,head=fp32",
    "model": "gpt2", "accum": 1,
}  # fmt: skip
CLIMBED = {f"fp64-{n}": (EXACT, n) for n in (2, 3, 4, 6, 8)}
CLIMBED |= {f"bf16-{n}": (MIXED, n) for n in (3, 8)}
DELAYED: Row = {
    "formats": "blocks=fp8-delayed,*.mlp=mxfp8",
    "accum": 1,
    "n_layer": 1,
    "dropout": 0.0,
}
CLIMBED |= {f"delayed-{n}": (DELAYED, n) for n in (3, 8)}
# On several devices, one layer: scales, amaxes and draws are those of one device.
CLIMBED |= {
    "fp64-data-11": ({
        "policy": "fp64", "formats": "blocks=fp8-delayed,*.mlp=mxfp8,head=fp8",
        "remat": "block", "accum": 2, "mesh": "data=2",
    }, WORLDS),
    "fp64-fsdp-11": ({
        "policy": "fp64", "formats": "blocks=fp8-rowwise,*.mlp=nvfp4,head=fp8", "model": "gpt2",
        "remat": "dots", "accum": 2, "mesh": "data=2,fsdp=2",
    }, WORLDS),
    "bf16-fsdp-11": ({
        "policy": "bf16", "formats": "blocks=fp8,*.mlp=fp8-rowwise", "accum": 1, "mesh": "fsdp=2",
    }, WORLDS),
}  # fmt: skip


@tier("rest", guard="rung 3 in fp64", where=lambda row, number: (row, number) != (EXACT, 3))
@pytest.mark.parametrize(("row", "number"), CLIMBED.values(), ids=CLIMBED)
def test_the_ladder_with_formats(
    row: Row, number: int, device: str, sides: tuple[Side, Side]
) -> None:
    case = Case(pair=GPT, a=sides[0], b=sides[1], config=matrix.config(row, device))
    outcome = ladder.climb(RUNGS[number - 1], case)
    assert outcome.verdict is Verdict.EQUAL, str(outcome.worst)
