"""What multiplies rows and weights on a CPU: the forms that its libraries take, their choice."""

import re
import sys
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import jax_impl.extra.capabilities
import jax_impl.extra.cpu
import jax_impl.extra.rules
import jax_impl.functional
import jax_impl.inspect.probe
import torch_ref.extra.capabilities
import torch_ref.inspect.probe
from jax_impl.extra.capabilities import has_bfloat16_library
from torch_ref.extra import onednn


def linear_and_gradients(product: Callable, size: tuple[int, int, int]) -> Callable:
    rows, d_in, d_out = size

    def products(x: Any, weight: Any, bias: Any, dy: Any) -> Any:
        y, vjp = jax.vjp(product, x, weight, bias)
        return y, *vjp(dy)

    shapes = (rows, d_in), (d_in, d_out), (d_out,), (rows, d_out)
    numbers = np.random.default_rng(1)  # small whole ones: their sums are exact in any order
    given = [jax.numpy.asarray(numbers.integers(-4, 5, s), "bfloat16") for s in shapes]
    return partial(jax.jit(products), *given)


@pytest.mark.parametrize("biased", [True, False])
def test_the_form_for_a_library_gives_the_same_numbers(biased: bool) -> None:
    found = []
    for product in (jax_impl.functional.linear, jax_impl.extra.cpu.linear):
        run = linear_and_gradients(product, (24, 40, 16))
        x, weight, bias, dy = run.args  # type: ignore[attr-defined]
        found.append(run.func(x, weight, bias if biased else None, dy))  # type: ignore[attr-defined]
    for ours, theirs in zip(*map(jax.tree.leaves, found), strict=True):
        assert ours.dtype == theirs.dtype == jax.numpy.bfloat16
        assert np.array_equal(ours, theirs)


def test_the_library_takes_all_three_products() -> None:
    if not has_bfloat16_library(jax.devices("cpu")[0]):
        pytest.skip("this CPU or jax has no library for it")
    run = linear_and_gradients(jax_impl.extra.cpu.linear, (64, 128, 96))
    lowered = run.func.lower(*run.args)  # type: ignore[attr-defined]
    text = lowered.compile().as_text().partition("ENTRY")[2]
    taken = re.findall(r"= f32\S+ fusion\(%\S+, %\S+\), kind=kCustom", text)
    assert len(taken) == 3 and " dot(" not in text, text


needs_onednn = pytest.mark.skipif(onednn.LINEAR is None, reason="this torch has no oneDNN")


def torch_linear_and_gradients(product: Callable, kind: torch.dtype, biased: bool) -> Any:
    numbers = np.random.default_rng(1)
    x, weight, bias, dy = (
        torch.tensor(numbers.integers(-4, 5, shape), dtype=kind)
        for shape in ((24, 40), (16, 40), (16,), (24, 16))
    )
    given = [each.requires_grad_() for each in (x, weight, *([bias] if biased else []))]
    y = product(*given)
    return [y.detach(), *torch.autograd.grad(y, given, dy)]


@needs_onednn
@pytest.mark.parametrize("biased", [True, False])
def test_onednn_gives_the_same_numbers(biased: bool) -> None:
    with FlopCounterMode(display=False) as counter:
        ours = torch_linear_and_gradients(onednn.linear, torch.float32, biased)
    for one, other in zip(ours, torch_linear_and_gradients(F.linear, torch.float64, biased)):
        assert torch.equal(one.double(), other)  # of small whole numbers
    assert counter.get_flop_counts()["Global"] == {onednn.LINEAR: 3 * 2 * 24 * 40 * 16}


@needs_onednn
def test_a_frozen_weight_costs_no_product() -> None:
    x, weight = torch.ones(4, 8, requires_grad=True), torch.ones(2, 8)
    with FlopCounterMode(display=False) as counter:
        onednn.linear(x, weight).sum().backward()
    assert counter.get_total_flops() == 2 * 2 * 4 * 8 * 2


CHOICES = {  # the CPU's maker, what torch may use of it -> whether oneDNN multiplies float32
    ("AMD EPYC", "AVX512"): True,
    ("AMD EPYC", "AVX2"): False,
    ("Intel(R) Xeon(R)", "AVX512"): False,
}


@needs_onednn
@pytest.mark.parametrize("model, capability", CHOICES)
def test_a_limit_on_instructions_counts(
    monkeypatch: pytest.MonkeyPatch, model: str, capability: str
) -> None:
    flags = ["avx2", "avx512f", "avx512_bf16"]  # the CPU's own, under any limit
    monkeypatch.setattr("lockstep.provenance.cpu", lambda: {"model": model, "flags": flags})
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    cpu = torch.device("cpu")
    assert onednn.has_float32_library(cpu) is CHOICES[model, capability]
    assert onednn.has_bfloat16_units(cpu) is (capability == "AVX512")


@pytest.mark.parametrize("library", [True, False])
@pytest.mark.parametrize(
    ("twin", "dtype", "name"),
    [(jax_impl, "bfloat16", "extra.cpu"), (torch_ref, "float32", "extra.onednn")],
)
def test_the_doctor_times_what_a_step_multiplies(
    monkeypatch: pytest.MonkeyPatch, twin: Any, dtype: str, name: str, library: bool
) -> None:
    place, taken = f"{twin.__name__}.{name}.linear", []
    right = attrgetter(f"{name}.linear")(twin)

    def linear(*operands: Any) -> Any:
        taken.append(operands)
        return right(*operands)

    monkeypatch.setattr(twin.extra.capabilities, f"has_{dtype}_library", lambda device: library)
    monkeypatch.setattr(place, linear)
    # Without what they remember from before.
    for cached in (
        jax_impl.extra.rules.make_product,
        jax_impl.extra.capabilities.find_capabilities,
    ):
        module = sys.modules[cached.__module__]
        monkeypatch.setattr(module, cached.__name__, cached.__wrapped__)
    monkeypatch.setattr(
        jax_impl.inspect.probe, "find_capabilities", jax_impl.extra.capabilities.find_capabilities
    )
    monkeypatch.setattr(twin.inspect.probe, "fastest", lambda multiply: str(multiply().dtype))
    timed = twin.inspect.probe.matmul_seconds()
    assert {"float32", "bfloat16"} <= timed.keys()
    assert all(kind in (name, f"torch.{name}") for name, kind in timed.items())
    assert len(taken) == library
