"""One place says what a device can do, and both twins are built by what it says."""

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch

from lockstep import devices
from lockstep.compile import targets
from lockstep.config.policy import Dtypes
from lockstep.devices import Capabilities
from lockstep.process import ROOT
from parity_tests.pair import FRAMEWORKS, toy

PACKAGES = ("lockstep", "lockstep_compiler", "jax_impl", "torch_ref", "benchmarks", "examples")
TABLES = {"lockstep/devices.py", "lockstep/formats/table.py", "lockstep/plan/rates.py"}
# That of the device with that of a build's kernels.
ALLOWED = {"made_for <= device.capability"}
# A compute capability, or a number that one is compared with.
COMPARED = re.compile(
    r"capability\b|\b(major|minor|AMPERE|TENSOR_CORES|SINCE|UNITS)\b|\(\d+, \d+\)"
)


def comparisons(source: str) -> Iterator[str]:
    """Where a compute capability is compared; a version is none."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            ordered = isinstance(node.ops[0], (ast.Lt, ast.LtE, ast.Gt, ast.GtE))
            text = ast.unparse(node)
            if ordered and COMPARED.search(text) and "version" not in text:
                yield text


def test_nothing_else_compares_a_capability() -> None:
    """The two tables do, and the plan's shares by architecture; others ask `Capabilities`."""
    found: dict[str, set[str]] = {}
    for file in (file for package in PACKAGES for file in (ROOT / package).rglob("*.py")):
        if here := {*comparisons(file.read_text(encoding="utf-8"))} - ALLOWED:
            found[str(file.relative_to(ROOT))] = here
    assert found.keys() == TABLES, found


@pytest.mark.parametrize(
    ("capability", "half", "cores", "tf32", "recipes"),
    [
        ((5, 0), "", False, False, ""),
        ((6, 1), "float16", False, False, ""),
        ((7, 5), "float16", True, False, ""),
        ((8, 6), "bfloat16 float16", True, True, ""),
        ((8, 9), "bfloat16 float16", True, True, "fp8 fp8-delayed"),
        ((10, 0), "bfloat16 float16", True, True, "fp8 fp8-delayed"),
    ],
)
def test_what_a_capability_says(
    capability: tuple[int, int], half: str, cores: bool, tf32: bool, recipes: str
) -> None:
    found = Capabilities.of_cuda(capability)
    assert " ".join(sorted(found.half)) == half
    assert (found.tensor_cores, found.tf32) == (cores, tf32)
    assert " ".join(sorted(found.recipes)) == recipes


def test_other_devices_say_what_they_multiply() -> None:
    """No capability, and no tensor cores of NVIDIA's."""
    said = {name: devices.find(name).capabilities for name in ("tpu-v5e", "m2", "mi300x")}
    assert {name: each.platform for name, each in said.items()} == {
        "tpu-v5e": "tpu", "m2": "mps", "mi300x": "rocm"
    }  # fmt: skip
    assert said["tpu-v5e"].half == {"bfloat16"} and "float16" in said["mi300x"].half
    assert not any(each.tf32 or each.tensor_cores or each.recipes for each in said.values())


def test_an_absent_device_has_the_kernels_that_are_documented() -> None:
    """cuDNN's in half precision, of some heads; Triton's in float32."""
    h100, t4, tpu = (targets.find(n).capabilities for n in ("h100", "t4", "tpu-v5e"))
    has = h100.fused_attention
    assert [has("bfloat16", d) for d in (64, 128, 100, 136)] == [True, True, False, False]
    assert has("float32", 100)
    assert not any(each.fused_attention("float16", 64) for each in (t4, tpu))


def make_model(framework: str, dtypes: Dtypes) -> Any:
    package = {"jax": "jax_impl", "torch": "torch_ref"}[framework]
    make = import_module(f"{package}.extra.rules").make_model
    config, known = toy(n_layer=3), Capabilities(platform="cpu")
    if framework == "jax":
        return make(config, dtypes, known)
    return make(config, dtypes, torch.device("cpu"), known)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("module", ["blocks.1.mlp.up", "blocks.1.attn.attend", "head", ""])
def test_an_unknown_recipe_is_refused(framework: str, module: str) -> None:
    """An unknown recipe of a module or the policy is an error, not the usual product."""
    known = toy(n_layer=3).dtypes
    wrong = replace(known.policy, recipe="fp7")
    modules = {module: wrong} if module else dict.fromkeys(known.modules, wrong)
    dtypes = replace(known, recipe="" if module else "fp7", modules={**known.modules, **modules})
    make_model(framework, known)
    with pytest.raises(ValueError, match="recipe 'fp7': unknown; use one of .*fp8"):
        make_model(framework, dtypes)
    with pytest.raises(ValueError, match="recipe 'fp7'"):
        assert wrong.delayed
