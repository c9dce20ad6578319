"""`--fp32-islands`: which modules a pattern means, that they and no others multiply in float32, and
that the twins agree."""

from collections import Counter
from itertools import product
from typing import Any

import pytest

from lockstep.config import Config, from_flags, islands
from lockstep.errors import UserError
from lockstep.judge.verdict import Verdict
from lockstep.model.stacked import scans_layers
from lockstep.parity import ladder, matrix
from lockstep.parity.case import Case
from lockstep.parity.ladder import RUNGS
from lockstep.parity.pair import GPT
from lockstep.parity.side import Side
from parity_tests.input.programs import Op, read
from parity_tests.pair import FRAMEWORKS, toy
from parity_tests.tiers import tier
from parity_tests.twins.test_roles import MATMULS, B, D, T, V, violations
from parity_tests.twins.test_roles import small as small_config

# --- patterns


def match_names(patterns: str, **flags: Any) -> list[str]:
    names = toy(n_layer=2, **flags).model.matmuls
    return [name for name in names if islands.match(patterns, name)]


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        ("head", ["head"]),
        ("blocks.*.mlp.down", ["blocks.0.mlp.down", "blocks.1.mlp.down"]),
        ("*.down,head", ["blocks.0.mlp.down", "blocks.1.mlp.down", "head"]),
        ("blocks.1.attn", [f"blocks.1.attn.{part}" for part in ("qkv", "attend", "proj")]),
        ("*.attend", ["blocks.0.attn.attend", "blocks.1.attn.attend"]),
        ("blocks.0", match_names("blocks.0.*")),
        ("blocks,head", toy(n_layer=2).model.matmuls),
        ("*", toy(n_layer=2).model.matmuls),
        ("", []),
    ],
)
def test_a_pattern_means(patterns: str, names: list[str]) -> None:
    assert match_names(patterns) == names


def test_the_names_are_those_of_weights_but_for_attention_s_own_matmuls() -> None:
    for family in ("tiny", "gpt2"):
        config = toy(family, tied=False)
        weights = {n.removesuffix(".weight") for n in GPT.initial(config).params}
        attends = {n for n in config.model.matmuls if n.endswith(".attend")}
        assert {*config.model.matmuls} - weights == attends and len(attends) == 3


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"fp32_islands": "mlp.down"}, "mlp.down: fits no module; use blocks.*.mlp.down"),
        ({"fp32_islands": "head,blocks.7"}, "blocks.7: fits no module; use blocks"),
        ({"fp32_islands": "head,"}, "'': fits no module"),
        ({"fp32_islands": "*.gate", "model": "gpt2"}, r"\*.gate: fits no module"),
        ({"fp32_islands": "blocks.0", "layers": "scan"}, "--layers scan: .*use --layers unroll"),
    ],
)
def test_a_pattern_that_means_nothing_is_one_line(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said) as error:
        from_flags({"model": "tiny", **flags}, accelerator=False)
    assert "\n" not in str(error.value)


def test_layers_that_differ_are_unrolled() -> None:
    deep: dict[str, Any] = {"n_layer": 24}
    assert scans_layers(toy(**deep)) and scans_layers(toy(**deep, fp32_islands="*.down,head"))
    assert not scans_layers(toy(**deep, fp32_islands="blocks.23"))


def test_dtypes_are_those_of_the_module_that_asks() -> None:
    config = toy(policy="bf16", eval_policy="fp32", fp32_islands="blocks.1,head")
    dtypes = config.dtypes
    for layer, compute in enumerate(["bfloat16", "float32", "bfloat16"]):
        qkv = dtypes.at(f"blocks.{layer}.attn.qkv")
        assert (qkv.compute, qkv.param, qkv.output) == (compute, "float32", "float32")
    assert dtypes.policy == config.precision.roles
    assert (dtypes.compute, dtypes.at("head").compute) == ("bfloat16", "float32")
    assert {own.compute for own in config.eval_dtypes.modules.values()} == {"float32"}


def test_a_recorded_config_reads_as_it_was_written() -> None:
    config = toy(fp32_islands="head")
    assert config.to_json()["precision"]["fp32_islands"] == "head"
    assert Config.from_json(config.to_json()) == config


# --- what multiplies in which dtype


def matmul_kind(op: Op, config: Config) -> str:
    """By the only sizes that are no product of B, T and H."""
    shapes = [value.shape for value in (*op.inputs, *op.outputs)]
    if any(len(shape) > 2 for shape in shapes):
        return "attend"
    inside = frozenset(size for shape in shapes for size in shape) - {B * T}
    kinds = {(D, 3 * D): "qkv", (D, D): "proj", (D, config.model.d_mlp): "mlp", (D, V): "head"}
    return {frozenset(sizes): kind for sizes, kind in kinds.items()}[inside]


def count_matmuls(framework: str, config: Config) -> Counter[tuple[str, str]]:
    """How many matmuls of each kind have inputs and outputs in each dtype, in one step."""
    found = Counter[tuple[str, str]]()
    for op in read(framework, config).ops:
        if op.name in MATMULS:
            dtypes = {value.dtype for value in (*op.inputs, *op.outputs)}
            found[matmul_kind(op, config), " ".join(sorted(dtypes))] += 1
    return found


def expected_matmuls(config: Config) -> Counter[tuple[str, str]]:
    """Three for each linear layer, forward and backward; attention has two of its own."""
    found = Counter[tuple[str, str]]()
    for name in config.model.matmuls:
        part = name.split(".")[-1]
        kind = "mlp" if ".mlp." in name else part
        wide = islands.match(config.precision.fp32_islands, name)
        dtype = "float32" if wide else config.precision.roles.compute
        found[kind, dtype] += 6 if part == "attend" else 3
    return found


@tier("full", guard="tiny", where=lambda framework, family: (framework, family) == ("jax", "gpt2"))
@pytest.mark.parametrize("family", ["tiny", "gpt2"])
@pytest.mark.parametrize(
    ("patterns", "policy"),
    [
        ("head", "bf16"),
        ("blocks.*.attn.attend", "fp16"),
        ("blocks.*.attn", "params=bfloat16,compute=bfloat16,output=float32"),
        ("blocks.1,*.down", "bf16"),
        ("*", "fp16"),
        ("blocks.0", "fp32"),
    ],
)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_islands_and_no_others_multiply_in_float32(
    framework: str, patterns: str, policy: str, family: str
) -> None:
    config = small_config(family, policy, 1).replace(
        n_layer=2, layers="unroll", fp32_islands=patterns
    )
    assert count_matmuls(framework, config) == expected_matmuls(config)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_islands_in_float64_change_no_dtype(framework: str) -> None:
    config = small_config("tiny", "fp64", 1).replace(fp32_islands="blocks,head")
    assert violations(framework, read(framework, config), config) == set()


# --- parity

Row = dict[str, Any]
SOME: Row = {"fp32_islands": "blocks.1,head", "remat": "block"}
ALIKE: Row = {"fp32_islands": "*.attend,*.down,head", "model": "gpt2", "remat": "dots",
              "layers": "scan"}  # fmt: skip
CLIMBED = [
    *product([ALIKE], ("fp64", "bf16"), (2, 3)),
    *product([SOME], ("fp64", "bf16"), (3,)),
    (ALIKE, "fp64", 8),
]


@tier("rest", guard="islands' dtypes, and bugs of islands")
@tier(
    "full",
    guard="rung 2 in fp64, rung 3 in bf16, in make test-rest",
    where=lambda policy, number: (policy, number) in (("bf16", 2), ("fp64", 3)),
)
@pytest.mark.parametrize(
    ("row", "policy", "number"),
    [pytest.param(*case, id=f"{case[0]['fp32_islands']}-{case[1]}-{case[2]}") for case in CLIMBED],
)
def test_the_ladder_with_islands(
    row: Row, policy: str, number: int, device: str, sides: tuple[Side, Side]
) -> None:
    config = matrix.config({**row, "policy": policy}, device)
    outcome = ladder.climb(RUNGS[number - 1], Case(pair=GPT, a=sides[0], b=sides[1], config=config))
    assert outcome.verdict is Verdict.EQUAL, str(outcome.worst)
