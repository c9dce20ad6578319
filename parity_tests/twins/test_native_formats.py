"""fp8 by units made for it: the numbers that are emulated elsewhere, bit for bit, and their
products; on a CPU both frameworks multiply them by hand."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import jax_impl.precision
import jax_impl.products
import torch_ref.precision
import torch_ref.products
from jax_impl.kernels import compiles_float16
from lockstep.config import from_flags
from lockstep.formats.table import NATIVE, RECIPES
from parity_tests.pair import norm_gap

RECIPE = RECIPES["fp8"]
SCALES = np.array([2.0**-7, 2.0**-9, 2.0**-14], np.float32)


EVEN, ODD = (64, 48, 32), (63, 45, 30)


def operands(sizes: tuple[int, int, int] = EVEN) -> list[np.ndarray]:
    """x (R, I), weight (I, O), bias, and the gradient of the output: numbers of many sizes."""
    random = np.random.default_rng(0)
    rows, d_in, d_out = sizes
    shapes = (rows, d_in), (d_in, d_out), (d_out,), (rows, d_out)
    return [(random.standard_normal(s) * np.exp(random.normal(0, 2, s))).astype(np.float32)
            for s in shapes]  # fmt: skip


def in_jax(
    form: str, scales: np.ndarray | None, sizes: tuple[int, int, int] = EVEN
) -> list[np.ndarray]:
    """The product and its derivatives by x, weight and bias, and by scales."""
    *given, dy = operands(sizes)
    product = jax_impl.products.NARROW[form](jnp.matmul)
    named = () if scales is None else (None, scales)

    @jax.jit
    def run(*arrays: Any) -> Any:
        y, back = jax.vjp(lambda *each: product(*each), *arrays)
        return y, *(grad for grad in back(jnp.array(dy)) if grad is not None)

    return [np.asarray(each) for each in run(*given, *named)]


def in_torch(
    form: str, scales: np.ndarray | None, sizes: tuple[int, int, int] = EVEN
) -> list[np.ndarray]:
    x, weight, bias, dy = (torch.tensor(each) for each in operands(sizes))
    leaves = [x, weight.T.contiguous(), bias, *([] if scales is None else [torch.tensor(scales)])]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    product = torch_ref.products.NARROW[form](F.linear)
    y = product(*leaves[:3], *([None, leaves[3]] if scales is not None else []))
    y.backward(dy)
    dx, dweight, *others = (leaf.grad.numpy() for leaf in leaves if leaf.grad is not None)
    return [y.detach().numpy(), dx, dweight.T, *others]


@pytest.mark.parametrize("name", [name.removeprefix("native ") for name in NATIVE])
@pytest.mark.parametrize("run", [in_jax, in_torch])
def test_a_native_product_is_the_emulated_one(run: Callable, name: str) -> None:
    if run is in_jax and not compiles_float16(jax.devices("cpu")[0]):
        pytest.skip("XLA makes float8 of float16, which it cannot compile for this CPU")
    scales = SCALES if name == "fp8-delayed" else None
    ours, theirs = run(f"native {name}", scales), run(name, scales)
    assert len(ours) == len(theirs) >= 4
    # Sums of 64 exact products in float32, in another order.
    assert [norm_gap(a, b) < 1e-6 for a, b in zip(ours, theirs)] == [True] * len(ours)
    other = run("tf32", None)
    assert all(norm_gap(a, b) > 1e-3 for a, b in list(zip(ours, other))[:3])


def test_units_that_take_multiples_of_16_alone_are_given_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """cuBLAS's do; zeros are added, and cut off."""
    scaled_mm = torch._scaled_mm

    def strict(a: torch.Tensor, b: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        assert not [n for n in (*a.shape, *b.shape) if n % 16]
        return scaled_mm(a, b, *rest, **more)

    monkeypatch.setattr(torch, "_scaled_mm", strict)
    for ours, theirs in zip(in_torch("native fp8", None, ODD), in_torch("fp8", None, ODD)):
        assert ours.shape == theirs.shape and norm_gap(ours, theirs) < 1e-6


@pytest.mark.parametrize("to", [RECIPE.x, RECIPE.dy])
@pytest.mark.parametrize("past", [1.0, 2.0**-6])
def test_native_numbers_are_the_emulated_ones(to: Any, past: float) -> None:
    """Bit for bit, saturation included."""
    x = operands()[0]
    scale = np.float32(2.0 ** np.ceil(np.log2(np.abs(x).max() / to.largest)) * past)
    jax_own, jax_other = (
        jax_impl.products.Rounded.of(jnp.array(x), to, 1, None, jnp.array(scale), native=native)
        for native in (True, False)
    )
    torch_own = torch_ref.products.Rounded.of(
        torch.tensor(x), to, 1, None, torch.tensor(scale), native=True
    )
    kinds = {3: ("float8_e4m3fn", 448.0), 2: ("float8_e5m2", 57344.0)}
    assert (jax_own.numbers.dtype.name, to.largest) == kinds[to.mantissa]
    emulated = np.asarray(jax_other.numbers)
    assert (np.asarray(jax_own.numbers).astype(np.float32) * scale == emulated).all()
    assert (torch_own.numbers.float().numpy() * scale == emulated).all()
    assert (np.abs(emulated).max() == to.largest * scale) == (past < 1) or past == 1


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_what_is_emulated_is_named(framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """fp8 is, where there are no units for it; blocks always are."""
    module = {"jax": jax_impl.precision, "torch": torch_ref.precision}[framework]
    device = jax.devices("cpu")[0] if framework == "jax" else torch.device("cpu")

    def named(**flags: Any) -> str:
        return module.name_emulated(
            from_flags({"device": "cpu", **flags}, accelerator=False), device
        )

    assert [named(policy=p) for p in ("fp8", "nvfp4", "bf16")] == ["fp8", "nvfp4", ""]
    monkeypatch.setattr(module, "has_float8_units", lambda device: True)
    assert named(policy="fp8") == named(policy="fp8-delayed") == ""
    assert (named(policy="mxfp8"), named(policy="fp8-rowwise")) == ("mxfp8", "fp8-rowwise")
    mixed = partial(named, policy="bf16")
    assert mixed(formats="blocks.1.mlp=fp8,blocks.2.mlp=nvfp4") == "nvfp4"
