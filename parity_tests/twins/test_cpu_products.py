"""A CPU multiplies rows and weights in forms that its libraries take; one is chosen."""

import re
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

import jax_impl.extra.attention
import jax_impl.extra.cpu
import jax_impl.extra.rules
import jax_impl.extra.ways
import jax_impl.functional
import jax_impl.inspect.probe
import jax_impl.twin
import torch_ref.extra.attention
import torch_ref.extra.cpu
import torch_ref.extra.ways
import torch_ref.inspect.probe
import torch_ref.twin
from lockstep import provenance
from lockstep.devices import Capabilities
from parity_tests.pair import toy
from torch_ref.model import Positions, attend


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
    units = {"avx512_bf16", "amx_bf16"} & {*(provenance.cpu()["flags"] or ())}
    if not units or not jax_impl.extra.cpu.EXISTS:
        pytest.skip("this CPU or jax has no library for it")
    run = linear_and_gradients(jax_impl.extra.cpu.linear, (64, 128, 96))
    lowered = run.func.lower(*run.args)  # type: ignore[attr-defined]
    text = lowered.compile().as_text().partition("ENTRY")[2]
    taken = re.findall(r"= f32\S+ fusion\(%\S+, %\S+\), kind=kCustom", text)
    assert len(taken) == 3 and " dot(" not in text, text


needs_onednn = pytest.mark.skipif(
    torch_ref.extra.cpu.LINEAR is None, reason="this torch has no oneDNN"
)


def torch_linear_and_gradients(product: Callable, kind: torch.dtype, biased: bool) -> Any:
    numbers = np.random.default_rng(1)
    x, weight, bias, dy = (
        torch.tensor(numbers.integers(-4, 5, shape), dtype=kind)
        for shape in ((24, 40), (16, 40), (16,), (24, 16))
    )
    given = [each.requires_grad_() for each in (x, weight, *([bias] if biased else []))]
    y = product(*given)
    return [y.detach(), *torch.autograd.grad(y, given, dy)]


PRODUCTS = [
    pytest.param("linear", "float32", torch_ref.extra.cpu.LINEAR, marks=needs_onednn),
    ("widened_linear", "bfloat16", torch.ops.lockstep.widened_linear),
    ("widened_linear", "float16", torch.ops.lockstep.widened_linear),
]


@pytest.mark.parametrize(("name", "kind", "operator"), PRODUCTS)
@pytest.mark.parametrize("biased", [True, False])
def test_a_product_gives_the_same_numbers(
    name: str, kind: str, operator: Any, biased: bool
) -> None:
    """Sums of small whole numbers are exact; what half precision leaves of them is rounded once."""
    dtype = getattr(torch, kind)
    with FlopCounterMode(display=False) as counter:
        ours = torch_linear_and_gradients(getattr(torch_ref.extra.cpu, name), dtype, biased)
    for one, other in zip(ours, torch_linear_and_gradients(F.linear, torch.float64, biased)):
        assert one.dtype == dtype and torch.equal(one, other.to(dtype))
    assert counter.get_flop_counts()["Global"] == {operator: 3 * 2 * 24 * 40 * 16}


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_widened_attention_rounds_its_result_alone(kind: str) -> None:
    """Attention that is written out rounds the probabilities, too: it is further from float64."""
    dtype, attention = getattr(torch, kind), torch_ref.extra.attention
    numbers = np.random.default_rng(1)
    q, k, v = (torch.tensor(numbers.normal(size=(2, 32, 3, 16)), dtype=dtype) for _ in range(3))
    exact = attention.attend_fused(q.double(), k.double(), v.double(), Positions(32))
    within = torch.finfo(dtype).eps / 2 * exact.abs() + torch.finfo(dtype).tiny + 1e-6
    widened = attention.attend_widened(q, k, v, Positions(32))
    assert widened.dtype == dtype and ((widened - exact).abs() <= within).all()
    written_out = attend(q, k, v, Positions(32), dtype=dtype, matmul=torch.matmul)
    assert not ((written_out - exact).abs() <= within).all()


def test_a_widened_product_casts_as_autocast_does() -> None:
    """The weight stays float32, and so does its gradient."""
    x = torch.ones(4, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.full((2, 8), 1 + 2.0**-9, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = torch_ref.extra.cpu.widened_linear(x, weight)
    assert torch.equal(y, torch.full((4, 2), 8.0, dtype=torch.bfloat16))
    grads = torch.autograd.grad(y.sum(), [x, weight])
    assert [each.dtype for each in grads] == [torch.bfloat16, torch.float32]


@needs_onednn
def test_a_frozen_weight_costs_no_product() -> None:
    x, weight = torch.ones(4, 8, requires_grad=True), torch.ones(2, 8)
    with FlopCounterMode(display=False) as counter:
        torch_ref.extra.cpu.linear(x, weight).sum().backward()
    assert counter.get_total_flops() == 2 * 2 * 4 * 8 * 2


LIBRARIES = ("matmul=ynnpack", "matmul=onednn")  # that some builds lack
WAYS = {  # policy -> the ways of JAX and of PyTorch in fast numerics, with a context of 128
    "fp64": (["attention=blocks"], []),
    "fp32": (["attention=blocks"], ["attention=reference", "attention=blocks", "matmul=onednn"]),
    "bf16": (
        ["attention=blocks", "matmul=ynnpack"],
        ["attention=reference", "attention=blocks", "attention=widened", "matmul=widened"],
    ),
    "fp16": (["attention=blocks"], ["attention=widened", "matmul=widened"]),
    "tf32": ([], []),
    "fp8": ([], []),
    "params=float32,compute=bfloat16,output=float32,grads=float32": ([], []),
}


@pytest.mark.parametrize("policy", WAYS)
def test_the_ways_that_stand_beside_the_framework_s_own(
    monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """No way may compute in another dtype, or be there in strict numerics."""
    cpu, gpu = Capabilities(platform="cpu"), Capabilities(platform="cuda")
    finders = jax_impl.extra.ways.find_ways, torch_ref.extra.ways.find_ways
    config = toy(policy=policy, numerics="fast", context=128, n_layer=3)
    monkeypatch.setattr(jax_impl.extra.cpu, "EXISTS", True)
    monkeypatch.setattr(torch_ref.extra.cpu, "LINEAR", len)
    for package in (jax_impl, torch_ref):
        monkeypatch.setattr(package.extra.ways, "can_keep_freed_memory", lambda: False)
    for find, expected in zip(finders, WAYS[policy]):
        assert find(config, cpu) == expected
        assert find(config, gpu) == find(config.replace(numerics="strict"), cpu) == []
        asked = find(config.replace(attention="reference"), cpu)
        assert asked == [way for way in expected if way.startswith("matmul")]
        short = find(config.replace(context=64), cpu)
        assert short == [way for way in expected if way != "attention=blocks"]
    monkeypatch.setattr(jax_impl.extra.cpu, "EXISTS", False)
    monkeypatch.setattr(torch_ref.extra.cpu, "LINEAR", None)
    for find, expected in zip(finders, WAYS[policy]):
        assert find(config, cpu) == [way for way in expected if way not in LIBRARIES]
    monkeypatch.setattr(jax_impl.extra.cpu, "EXISTS", True)
    monkeypatch.setattr(torch_ref.extra.cpu, "LINEAR", len)
    for package, find, expected in zip((jax_impl, torch_ref), finders, WAYS[policy]):
        monkeypatch.setattr(package.extra.ways, "can_keep_freed_memory", lambda: True)
        kept = [] if policy in ("tf32", "fp8") else ["memory=kept"]
        assert find(config, cpu) == expected + kept


@pytest.mark.parametrize(
    ("twin", "policy", "way", "place"),
    [
        (jax_impl, "bf16", "attention=blocks", "extra.attention.attend_in_blocks"),
        (jax_impl, "bf16", "matmul=ynnpack", "extra.cpu.linear"),
        (torch_ref, "bf16", "attention=blocks", "extra.cpu.InBlocks.forward"),
        (torch_ref, "bf16", "attention=widened", "extra.attention.attend_widened"),
        (torch_ref, "fp16", "matmul=widened", "extra.cpu.widened_linear"),
        pytest.param(torch_ref, "fp32", "matmul=onednn", "extra.cpu.linear", marks=needs_onednn),
    ],
)
def test_a_race_runs_the_operation_that_a_way_replaces(
    monkeypatch: pytest.MonkeyPatch, twin: Any, policy: str, way: str, place: str
) -> None:
    """Forward and backward, in the way that it was entered for and in no other."""
    taken, owner = list[str](), attrgetter(place.rpartition(".")[0])(twin)
    name, right = way.partition("=")[0], attrgetter(place)(twin)

    def take(*given: Any, **how: Any) -> Any:
        taken.append(way)
        return right(*given, **how)

    monkeypatch.setattr(jax_impl.extra.cpu, "EXISTS", True)
    monkeypatch.setattr(owner, place.rpartition(".")[2], take)
    cached = jax_impl.extra.rules.make_product  # with what it remembers from before
    monkeypatch.setattr(jax_impl.extra.rules, "make_product", cached.__wrapped__)
    config = toy(policy=policy, numerics="fast", context=128, d_model=32)
    rows, d = config.optim.batch_size * 128, config.model.d_model
    for asked in ("none", way):
        grads = twin.twin.operation(config.replace(autotune=asked), name)()
        assert taken == ([way] if asked == way else []), asked
        up = (d, 4 * d) if twin is jax_impl else (4 * d, d)
        of_linear = [(rows, d), up, *[(4 * d,)] * config.model.bias]
        expected = [(rows, config.model.d_qkv)] if name == "attention" else of_linear
        assert [tuple(each.shape) for each in grads] == expected
