"""Narrow formats by units made for them: the numbers that are emulated elsewhere, bit for bit, and
their products; on a CPU both frameworks multiply fp8 by hand."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_impl.extra.device
import jax_impl.extra.formats.products
import torch_ref.extra.device
import torch_ref.extra.formats.products
from lockstep.config import from_flags
from lockstep.devices import Capabilities
from lockstep.formats.table import RECIPES, Recipe, native_recipes
from parity_tests.pair import norm_gap
from parity_tests.twins.float8 import require_float8

SCALES = np.array([2.0**-7, 2.0**-9, 2.0**-14], np.float32)


EVEN, ODD = (64, 48, 32), (63, 45, 30)


def find_recipe(form: str) -> Recipe:
    """By its name; "native" in front: by the device's units."""
    name = form.removeprefix("native ")
    return replace(RECIPES[name], native=name != form)


def operands(sizes: tuple[int, int, int]) -> list[np.ndarray]:
    """x (R, I), weight (I, O), bias, and the gradient of the output: numbers of many sizes."""
    random = np.random.default_rng(0)
    rows, d_in, d_out = sizes
    shapes = (rows, d_in), (d_in, d_out), (d_out,), (rows, d_out)
    return [(random.standard_normal(s) * np.exp(random.normal(0, 2, s))).astype(np.float32)
            for s in shapes]  # fmt: skip


def in_jax(form: str, scales: np.ndarray | None, given: list[np.ndarray]) -> list[np.ndarray]:
    """The product and its derivatives by x, weight and bias, and by scales."""
    *given, dy = given
    product = partial(jax_impl.extra.formats.products.rounded_linear, find_recipe(form))
    named = () if scales is None else (scales,)

    @jax.jit
    def run(*arrays: Any) -> Any:
        y, back = jax.vjp(lambda *each: product(*each), *arrays)
        return y, *(grad for grad in back(jnp.array(dy)) if grad is not None)

    return [np.asarray(each) for each in run(*given, *named)]


def in_torch(form: str, scales: np.ndarray | None, given: list[np.ndarray]) -> list[np.ndarray]:
    x, weight, bias, dy = map(torch.tensor, given)
    leaves = [x, weight.T.contiguous(), bias, *([] if scales is None else [torch.tensor(scales)])]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    product: Any = partial(torch_ref.extra.formats.products.rounded_linear, find_recipe(form))
    y = product(*leaves[:3], scales=None if scales is None else leaves[3])
    y.backward(dy)
    dx, dweight, *others = (leaf.grad.numpy() for leaf in leaves if leaf.grad is not None)
    return [y.detach().numpy(), dx, dweight.T, *others]


SCALED_MM = torch._scaled_mm


def scaled_as_strictly_as_cublas(
    a: torch.Tensor, b: torch.Tensor, of_a: torch.Tensor, of_b: torch.Tensor, **more: Any
) -> torch.Tensor:
    """Sizes are multiples of 16, and a scale begins at 16 bytes of memory."""
    assert not [n for n in (*a.shape, *b.shape) if n % 16] and b.stride(0) == 1
    assert not [scale for scale in (of_a, of_b) if scale.data_ptr() % 16]
    return SCALED_MM(a, b, of_a, of_b, **more)


@pytest.mark.parametrize("name", sorted(native_recipes((9, 0))))
@pytest.mark.parametrize("run", [in_jax, in_torch])
def test_a_native_product_is_the_emulated_one(
    run: Callable, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if run is in_jax:
        require_float8()
    monkeypatch.setattr(torch, "_scaled_mm", scaled_as_strictly_as_cublas)
    run = partial(run, given=operands(ODD))
    scales = SCALES if name == "fp8-delayed" else None
    ours, theirs = run(f"native {name}", scales), run(name, scales)
    assert [x.shape for x in ours] == [x.shape for x in theirs] and len(ours) >= 4
    # Sums of 64 exact products in float32, in another order.
    assert [norm_gap(a, b) < 1e-6 for a, b in zip(ours, theirs)] == [True] * len(ours)
    other = run("tf32", None)
    assert all(norm_gap(a, b) > 1e-3 for a, b in list(zip(ours, other))[:3])


@pytest.mark.parametrize("place", [0, 1, 3], ids=["x", "weight", "gradient"])
@pytest.mark.parametrize("run", [in_jax, in_torch])
def test_an_infinity_that_is_clipped_shows(run: Callable, place: int) -> None:
    """In the weight's gradient, so that the step is skipped."""
    given = operands(EVEN)
    given[place][2, 1] = np.inf
    y, dx, dweight, *_ = run("fp8-delayed", SCALES, given)
    assert np.isfinite(y).all() and np.isfinite(dx).all()
    assert not np.isfinite(dweight).any()


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_what_is_emulated_is_named(framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Formats without units are named: TF32 and fp8 on a CPU, fp8 before Ada. Attention is written
    out then: inside a kernel nothing can be rounded."""
    module: Any = {"jax": jax_impl.extra.device, "torch": torch_ref.extra.device}[framework]
    device = jax.devices("cpu")[0] if framework == "jax" else torch.device("cpu")

    def named(fact: str = "emulated", **flags: Any) -> str:
        config = from_flags({"device": "cpu", **flags}, accelerator=False)
        return module.describe(config, device)[fact]

    expected = {"tf32": "tf32", "fp8": "fp8", "fp32": "", "bf16": ""}
    assert {p: named(policy=p, numerics="fast") for p in expected} == expected
    assert named("attention", policy="tf32", numerics="fast").startswith("reference")
    ampere, ada = (Capabilities.of_cuda(capability) for capability in ((8, 0), (8, 9)))
    monkeypatch.setattr(module, "find_capabilities", lambda device: ada)
    assert named(policy="fp8") == named(policy="fp8-delayed") == ""
    assert named(policy="fp64", formats="blocks.1.mlp=fp8") == "fp8"  # of float64, by hand
    monkeypatch.setattr(module, "find_capabilities", lambda device: ampere)
    mixed = "blocks.1.mlp=fp8,blocks.2.mlp=fp8-delayed"
    assert named(policy="bf16", formats=mixed) == "fp8 fp8-delayed"
