"""`--fp32-islands`, `--formats` and a policy's `grads` say what each module computes in; those
modules and no others multiply so."""

from typing import Any

import pytest
import torch.nn.functional

import jax_impl.extra.cpu
import jax_impl.extra.rules
import jax_impl.functional
import torch_ref.extra.cpu
import torch_ref.extra.rules
from lockstep import devices
from lockstep.config import from_flags, islands
from lockstep.config.policy import POLICIES, Roles, resolve
from lockstep.devices import Capabilities
from lockstep.errors import UserError
from lockstep.parity.pair import GPT
from lockstep.plan.layers import scans_layers
from parity_tests.pair import FRAMEWORKS, toy
from parity_tests.twins.programs import read
from parity_tests.twins.test_roles import small as small_config
from parity_tests.twins.test_roles import violations

FORMATS = "blocks=fp8,head=fp8,*.mlp=bf16,blocks.1.attn=fp8-delayed,*.down=fp32"

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


@pytest.mark.parametrize("family", ["tiny", "gpt2"])
def test_the_names_are_those_of_weights_but_for_attention_s_own_matmuls(family: str) -> None:
    config = toy(family, tied=False)
    weights = {n.removesuffix(".weight") for n in GPT.initial(config).params}
    attends = {n for n in config.model.matmuls if n.endswith(".attend")}
    assert {*config.model.matmuls} - weights == attends and len(attends) == 3


@pytest.mark.parametrize(
    ("flags", "scanned"),
    [
        ({}, True),
        ({"fp32_islands": "*.down,head"}, True),
        ({"fp32_islands": "blocks.23"}, False),
        ({"formats": "*.down=fp32"}, True),
        ({"formats": "blocks.0=fp32"}, False),
        ({"formats": "blocks=fp32,blocks.23=bf16"}, False),
        ({"formats": "blocks=fp8"}, False),
    ],
)
def test_layers_that_differ_are_unrolled(flags: dict[str, Any], scanned: bool) -> None:
    deep = toy(n_layer=24, remat="block", policy="bf16", **flags)
    assert scans_layers(deep) is scanned
    assert not scans_layers(toy(n_layer=24, policy="bf16", **flags))  # nothing is recomputed


DEEP = {"model": "gpt2-medium", "policy": "bf16", "batch_size": 16, "accum": 1, "remat": "block"}


@pytest.mark.parametrize(
    ("flags", "device", "scanned"),
    [
        ({}, "h100", False),
        ({"batch_size": 256}, "h100", True),  # 89 GB; XLA may take 60
        ({"batch_size": 256}, "h200", False),
        ({"batch_size": 64}, "l4", True),
        ({"model": "gpt2", "batch_size": 512}, "h100", True),
        ({"batch_size": 256, "remat": "none"}, "h100", False),
        ({"batch_size": 256, "layers": "unroll"}, "h100", False),
        ({"layers": "scan"}, "h100", True),
        # Of what is not predicted, the depth decides.
        ({"policy": "fp32"}, "h100", True),
        ({"policy": "fp16"}, "t4", True),
        ({"lora_rank": 4}, "h100", True),
        ({"mesh": "fsdp=2"}, "h100", True),
        ({}, "tpu-v5e", True),
        ({"model": "gpt2"}, "tpu-v5e", False),
    ],
)
def test_recomputed_layers_are_scanned_where_unrolled_ones_do_not_fit(
    flags: dict[str, Any], device: str, scanned: bool
) -> None:
    config = from_flags(DEEP | flags, accelerator=True)
    assert scans_layers(config, devices.find(device).capabilities) is scanned


# --- the dtypes of a module


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
        "blocks.1.attn.qkv": "fp8-delayed",
        "blocks.1.attn.attend": "bfloat16",
        "blocks.1.attn.proj": "fp8-delayed",
        **{f"blocks.{i}.mlp.{name}": "bfloat16" for i in range(2) for name in ("gate", "up")},
        **{f"blocks.{i}.mlp.down": "float32" for i in range(2)},
        "head": "fp8",
    }


def test_a_module_in_the_policy_s_own_format_is_any_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has the product that most modules have, a CPU's library here; others have their own."""
    monkeypatch.setattr(jax_impl.extra.cpu, "EXISTS", True)
    device = Capabilities(platform="cpu")
    fast: dict[str, Any] = {"numerics": "fast", "autotune": "matmul=ynnpack"}
    names = "blocks.0.attn.qkv", "head"
    config = toy(policy="bf16", formats="*=bf16,head=fp32", **fast)
    rules: Any = jax_impl.extra.rules.FeatureLayers(config, config.dtypes, device)
    usual, own = (rules.product(config.dtypes.at(name)) for name in names)
    assert (usual, own) == (jax_impl.extra.cpu.linear, jax_impl.functional.linear)
    fast["autotune"] = "matmul=onednn"
    config = toy(policy="fp32", formats="*=fp32,head=bf16", **fast)
    rules = torch_ref.extra.rules.FeatureLayers(config, config.dtypes, device)
    usual, own = (rules.linear(name, 8, 8, bias=False).product for name in names)
    assert usual is torch_ref.extra.cpu.linear
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


# --- gradients


def spec(compute: str, grads: str, param: str = "float32", output: str = "float32") -> str:
    return f"params={param},compute={compute},output={output},grads={grads}"


def test_gradients_in_float16_have_a_loss_scale() -> None:
    assert resolve(spec("float32", "float16")).loss_scaling
    assert not resolve(spec("float32", "bfloat16")).loss_scaling
    wide: Any = dict.fromkeys(("param", "compute", "output", "grads"), "float32")
    assert resolve(spec("float32", "f32")) == Roles(**wide)


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


# --- islands in float64


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_islands_in_float64_change_no_dtype(framework: str) -> None:
    config = small_config("tiny", "fp64", 1).replace(fp32_islands="blocks,head")
    assert violations(framework, read(framework, config), config) == set()
