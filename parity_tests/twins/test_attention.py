"""Fused attention errs no more than the written-out one, and what runs is what is named.

parity_tests/oracles/test_attention.py holds each form to numpy, and to what each query may see.
"""

from functools import partial
from operator import attrgetter
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

import jax_impl.extra.attention
import jax_impl.model
import jax_impl.precision
import torch_ref.extra.attention
import torch_ref.extra.capabilities
from jax_impl.extra.attention import CUDNN, choose_attention
from lockstep.compile import targets
from lockstep.data.batch import blank_window
from lockstep.devices import Capabilities
from parity_tests.pair import (
    norm_gap,
    start,
    toy,
)
from parity_tests.tiers import tier
from parity_tests.twins.programs import Recorder
from torch_ref.extra.attention import attend_fused, attend_in_blocks
from torch_ref.io.bridge import to_numpy
from torch_ref.model import Positions, attend
from torch_ref.twin import TorchTwin

# B, T, H, K: odd sizes, and more than one tile of a kernel.
SHAPES = [
    (2, 7, 3, 5),
    (1, 33, 2, 16),
    (2, 64, 2, 32),
    (1, 128, 2, 64),
    (1, 197, 2, 8),
]
name_of = attrgetter("__name__")
CPU = Capabilities(platform="cpu")
GPU = Capabilities(platform="cuda", fused_attention=lambda dtype, d_head: True)


# --- fused and written out, in torch


def draw(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and the gradient that comes back, N(0, 1)."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(4)
    ]


def written_out(wide: torch.dtype) -> Any:
    return partial(attend, dtype=wide)


def outputs(function: Any, tensors: list[Tensor]) -> list[np.ndarray]:
    """y and the gradients of q, k and v."""
    *inputs, upstream = tensors
    q, k, v = (x.clone().requires_grad_() for x in inputs)
    y = function(q, k, v, Positions(q.shape[1]))
    gradients = torch.autograd.grad(y, (q, k, v), upstream)
    return [to_numpy(x.double()) for x in (y, *gradients)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("attention", [attend_fused, attend_in_blocks], ids=name_of)
def test_fused_errs_no_more_than_written_out_in_bfloat16(
    attention: Any, shape: tuple[int, ...]
) -> None:
    """It may round neither scores nor probabilities, and add up the blocks of a gradient: 0.5 to
    1.22 of the written-out error was seen."""
    assert max(excess(attention, draw(shape, torch.bfloat16))) < TWICE_AS_OFTEN


# The error of twice as many roundings of one size, which are independent.
TWICE_AS_OFTEN = 2**0.5


def excess(attention: Any, tensors: list[Tensor]) -> list[float]:
    """The errors of y and the gradients, over those of attention that is written out; both against
    float64 on the same rounded inputs."""
    exact = outputs(written_out(torch.float64), [x.double() for x in tensors])
    written, found = (outputs(f, tensors) for f in (written_out(torch.float32), attention))
    pairs = zip(found, written, exact, strict=True)
    return [float(np.linalg.norm(a - c) / np.linalg.norm(b - c)) for a, b, c in pairs]


def test_products_of_bfloat16_are_summed_in_float32() -> None:
    """Rounded once, the twins' gradients are within half an ulp each. Summed in bfloat16, as jax
    0.12 left to itself sums the gradient of the keys here, they are ten times farther apart."""
    tensors = draw((2, 256, 2, 64), torch.bfloat16)
    theirs = outputs(written_out(torch.float32), tensors)
    config = toy("tiny", policy="bf16", numerics="strict")
    policy, places = (
        jax_impl.precision.make_policy(config.dtypes.policy),
        jax_impl.model.Positions(256),
    )
    attention = partial(jax_impl.model.attend, positions=places, policy=policy)

    def gradients(*inputs: jax.Array) -> list[jax.Array]:
        *qkv, upstream = inputs
        y, backward = jax.vjp(attention, *qkv)
        return [y, *backward(upstream)]

    options = jax_impl.precision.compiler_options(config.precision, "cpu")
    inputs = [jnp.asarray(x.float().numpy(), jnp.bfloat16) for x in tensors]
    ours = jax.jit(gradients, compiler_options=options)(*inputs)
    for a, b in zip(ours, theirs, strict=True):
        assert norm_gap(np.asarray(a, np.float64), b) <= 2.0**-8


# --- causal blocks, in JAX


@tier("rest", guard="rung 6")
def test_recomputed_blocks_keep_no_scores() -> None:
    """Queries, keys and values alone are kept, as on CUDA without a kernel."""
    t = 3 * 64 + 5
    q, k, v, _ = (jnp.asarray(x.numpy()) for x in draw((1, t, 2, 8), torch.float32))
    config = toy(policy="fp32", numerics="fast", context=t, autotune="attention=blocks")
    policy, places = (
        jax_impl.precision.make_policy(config.dtypes.policy),
        jax_impl.model.Positions(t),
    )
    choice = choose_attention(config, config.dtypes, config.dtypes, CPU)
    assert choice.blocks == 3

    def find_largest(on_cpu: bool) -> int:
        attend = jax_impl.extra.attention.make_attention(choice, policy, jnp.einsum, on_cpu=on_cpu)
        _, backward = jax.vjp(lambda q, k, v: attend(q, k, v, places), q, k, v)
        return max(x.size for x in jax.tree.leaves(backward))

    assert find_largest(on_cpu=False) == q.size and find_largest(on_cpu=True) > t * t // 3


# --- the name of what runs

KERNELS = {
    "flash_attention": "_scaled_dot_product_flash_attention_for_cpu",
    "math": "_safe_softmax",
}


@pytest.mark.parametrize("policy", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("attention", ["auto", "fused", "reference"])
def test_torch_names_the_kernel_that_runs(attention: str, policy: str) -> None:
    config = toy(policy=policy, numerics="fast", attention=attention, n_layer=1)
    twin = start("torch", config)
    assert isinstance(twin, TorchTwin)
    with Recorder(twin.trainer.model) as recorder:
        twin.loss_and_grads(blank_window(config).select(0))
    ran = {op.name for op in recorder.ops}
    name = twin.describe()["attention"]
    if attention == "reference":
        assert name == "reference"
        assert "_softmax" in ran and not ran & {*KERNELS.values()}
    else:
        framework, _, backend = name.partition(":")
        assert framework == "sdpa" and backend.upper() in SDPBackend.__members__
        assert KERNELS[backend] in ran and "_softmax" not in ran


@pytest.mark.parametrize("packed", [False, True], ids=["one-sequence", "segments"])
@pytest.mark.parametrize("groups", [1, 2])
def test_torch_asks_for_the_kernel_by_what_it_runs(
    groups: int, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which kernels take grouped queries or a mask is another matter on each device."""
    config = toy(policy="bf16", numerics="fast", attention="fused", n_layer=1, n_kv_head=groups)
    twin, window = start("torch", config), blank_window(config)
    if packed:
        window = window._replace(segments=window.tokens)
    twin.prepare(window)
    asked = Mock(wraps=torch._fused_sdp_choice)
    ran = Mock(wraps=torch.nn.functional.scaled_dot_product_attention)
    monkeypatch.setattr(torch, "_fused_sdp_choice", asked)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", ran)
    assert twin.describe()["attention"].startswith("sdpa:")
    twin.step(twin.place(window))()
    for one, other in zip(asked.call_args.args, ran.call_args.args, strict=True):
        assert (one.shape, one.dtype, one.requires_grad) == (
            other.shape, other.dtype, other.requires_grad,
        )  # fmt: skip
    assert asked.call_args.kwargs == ran.call_args.kwargs


NONE = "reference (no cuDNN attention for {}, head dim 16 on {})"
HALF = {"policy": "bf16"}
IN_BLOCKS: dict[str, Any] = {"autotune": "attention=blocks"}
JAX_NAMES: list[tuple[dict[str, Any], str, str]] = [  # flags, device, the name of what runs
    (HALF, "kernels", "cudnn"),
    ({"policy": "fp16", "attention": "fused"}, "kernels", "cudnn"),
    (HALF | {"attention": "reference"}, "kernels", "reference"),
    (HALF | {"numerics": "strict"}, "kernels", "reference"),
    (HALF, "cpu", "reference"),
    (HALF | {"attention": "fused"}, "cpu", NONE.format("bfloat16", "cpu")),
    ({"context": 1024} | IN_BLOCKS, "cpu", "reference in 4 causal blocks"),
    ({"context": 1024}, "cpu", "reference"),
    ({"context": 1024, "attention": "reference"} | IN_BLOCKS, "cpu", "reference"),
    ({"context": 1024, "numerics": "strict"}, "cpu", "reference"),
    (HALF, "no kernels", NONE.format("bfloat16", "gpu")),
    ({"policy": "tf32"}, "kernels", NONE.format("float32", "gpu")),  # of a length without tiles
    ({"policy": "tf32", "context": 64}, "kernels", "triton"),
    ({"policy": "fp32", "context": 64}, "kernels", NONE.format("float32", "gpu")),
    (HALF, "h100", "cudnn"),
    ({"policy": "tf32", "context": 256}, "h100", "triton"),
    (HALF | {"numerics": "strict"}, "h100", "reference"),
    (
        {"policy": "fp32", "context": 256},
        "t4",
        NONE.format("float32", "gpu").replace("reference", "reference in 4 causal blocks"),
    ),
    (HALF | {"context": 256}, "tpu-v5e", "reference in 4 causal blocks"),
]


@pytest.mark.parametrize(("flags", "device", "expected"), JAX_NAMES)
def test_jax_names_what_runs(flags: dict[str, Any], device: str, expected: str) -> None:
    """On devices that are here or absent, each asked for the policy's own dtype and head dim."""
    asked = []

    def probe(compute: str, d_head: int) -> bool:
        asked.append((compute, d_head))
        return device == "kernels"

    config = toy(**{"numerics": "fast", **flags})
    if device in ("h100", "t4", "tpu-v5e"):
        known = targets.find(device).capabilities
    else:
        known = Capabilities(platform="cpu" if device == "cpu" else "cuda", fused_attention=probe)
    assert jax_impl.extra.attention.describe_attention(config, known) == expected
    assert {*asked} <= {(config.precision.roles.compute, 16)}


def test_no_blocks_and_no_triton_where_tokens_are_masked() -> None:
    config = toy(policy="bf16", numerics="fast", context=128, **IN_BLOCKS)
    cpu = torch.device("cpu")
    known = torch_ref.extra.capabilities.find_capabilities(cpu)
    describe = partial(torch_ref.extra.attention.describe_attention, config, cpu, known)
    assert describe() == "reference in 2 causal blocks"
    assert describe(segments=True).startswith("sdpa:")
    config = toy(policy="tf32", numerics="fast", context=64)
    said = jax_impl.extra.attention.describe_attention(config, GPU, segments=True)
    assert said == NONE.format("float32", "gpu")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"autotune": "attention=reference"}, "reference"),
        ({"autotune": "attention=reference", "attention": "fused"}, "sdpa:flash_attention"),
        (IN_BLOCKS, "reference in 2 causal blocks"),
        (IN_BLOCKS | {"policy": "fp16"}, "sdpa:flash_attention"),  # blocks are of bfloat16
        ({"autotune": "attention=widened"}, "sdpa:flash_attention in float32"),
        ({"autotune": "attention=widened", "policy": "fp64"}, "sdpa:flash_attention"),
        (IN_BLOCKS | {"policy": "tf32"}, "reference (no kernel rounds to TF32)"),
        (IN_BLOCKS | {"attention": "reference"}, "reference"),
        (IN_BLOCKS | {"context": 64}, "reference"),
        ({"autotune": "matmul=onednn"}, "sdpa:flash_attention"),
    ],
)
def test_torch_on_a_cpu_attends_as_it_is_told(flags: dict[str, Any], expected: str) -> None:
    given: dict[str, Any] = {"policy": "bf16", "numerics": "fast", "context": 128, **flags}
    config = toy(**given)
    known = torch_ref.extra.capabilities.find_capabilities(torch.device("cpu"))
    describe = partial(torch_ref.extra.attention.describe_attention, config, torch.device("cpu"))
    assert describe(known) == expected
    assert describe(GPU) == describe_otherwise(config)


def describe_otherwise(config: Any) -> str:
    """The attention of another device, which is told nothing."""
    plain, cpu = config.replace(autotune="none"), torch.device("cpu")
    return torch_ref.extra.attention.describe_attention(plain, cpu, GPU)


def test_an_evaluation_in_float32_is_not_given_to_cudnn() -> None:
    """The kernel is for half precision, and each policy asks for itself."""
    config = toy(numerics="fast", policy="bf16", eval_policy="fp32")
    fused = [
        choose_attention(config, dtypes, dtypes.policy, GPU).name == CUDNN
        for dtypes in (config.dtypes, config.eval_dtypes)
    ]
    assert fused == [True, False]
