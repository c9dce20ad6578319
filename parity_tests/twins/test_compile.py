"""`--compile`: one graph, the same numbers, and no recompilation from step to step.

Most tests take the tracer's own backend (aot_eager): they ask whether the model and every remat
mode can be traced whole. Two tests run Inductor, which needs a C++ compiler.
"""

import shutil
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from lockstep.twin import StepResult
from parity_tests.pair import run, start, toy
from parity_tests.tiers import tier
from torch_ref.extra import cpu
from torch_ref.extra.compiled import inductor_options

# What torch's own compiler does and torch deprecates.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
]


INDUCTOR = torch.compile
needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="Inductor needs a C++ compiler")


@pytest.fixture(autouse=True)
def traced_whole(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()

    def trace(function: Any, options: dict[str, Any]) -> Any:
        return INDUCTOR(function, backend="aot_eager", fullgraph=True)

    monkeypatch.setattr(torch, "compile", trace)
    yield
    torch._dynamo.reset()


def curves(family: str = "tiny", *, said: str = "", **flags: Any) -> list[list[StepResult]]:
    """Three steps, eager and compiled, in one graph.

    Args:
        said: what the attention's name has in it.
    """
    found = []
    for compiled in (False, True):
        config = toy(family, **{"steps": 3, "n_layer": 2, "compile": compiled} | flags)
        twin = start("torch", config)
        assert said in twin.describe()["attention"]
        twin.prepare()
        found.append(run(twin, config))
    assert counters["stats"]["unique_graphs"] == 1
    return found


def numbers(results: list[StepResult]) -> list[tuple[float, float]]:
    return [(result.loss, result.grad_norm) for result in results]


@tier("rest", guard="a step with dropout is traced; the eager step")
@pytest.mark.parametrize(
    ("family", "remat"), [("tiny", "none"), ("tiny", "sqrt"), ("gpt2", "block")]
)
def test_compiled_equals_eager(family: str, remat: str) -> None:
    layers = 4 if remat == "sqrt" else 2  # two segments
    for eager, traced in zip(*curves(family, policy="fp64", remat=remat, n_layer=layers)):
        # The tracer may decompose an operation; 20 steps of float64 drift by less: measured 0.
        assert abs(eager.loss - traced.loss) <= 1e-12
        assert abs(eager.grad_norm - traced.grad_norm) <= 1e-10


@pytest.mark.parametrize(("numerics", "rounds"), [("strict", True), ("fast", False)])
def test_strict_numerics_ask_inductor_to_round(
    monkeypatch: pytest.MonkeyPatch, numerics: str, *, rounds: bool
) -> None:
    compile_loss = Mock()
    monkeypatch.setattr(torch, "compile", compile_loss)
    start("torch", toy(policy="bf16", n_layer=1, compile=True, numerics=numerics))
    assert compile_loss.call_args.kwargs == {"options": {"emulate_precision_casts": rounds}}


@needs_compiler
@tier("rest", guard="strict_numerics_ask_inductor: the option; Inductor starts in ten seconds")
def test_strict_inductor_rounds_between_fused_operations() -> None:
    """A product of three in bfloat16 is rounded twice, as in eager mode; fast numerics keep the
    first product in float32."""
    x, y, z = torch.randn(3, 1024, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = {}
    for numerics in ("strict", "fast"):
        options = inductor_options(toy(policy="bf16", numerics=numerics))
        torch._dynamo.reset()
        found[numerics] = INDUCTOR(lambda x, y, z: x * y * z, options=options)(x, y, z)
    eager = x * y * z
    assert torch.equal(found["strict"], eager)
    assert not torch.equal(found["fast"], eager)


@needs_compiler
@tier("rest", guard="strict_numerics_ask_inductor: the option; a step takes half a minute")
def test_strict_inductor_step_equals_eager_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss within the ulp of its sum's order, the gradient's norm to the bit; without the
    roundings both differ by a hundred times more (SwiGLU's product)."""
    monkeypatch.setattr(torch, "compile", INDUCTOR)
    eager, fused = curves(policy="bf16", n_layer=1, steps=1, numerics="strict")
    assert abs(eager[0].loss - fused[0].loss) <= 2 * np.spacing(np.float32(eager[0].loss))
    assert eager[0].grad_norm == fused[0].grad_norm


def test_dropout_does_not_recompile() -> None:
    """The mask's key changes with each step; the graph must not depend on it, the masks must."""
    small: dict[str, Any] = {"policy": "bf16", "n_layer": 1, "accum": 2, "numerics": "fast"}
    eager, traced = map(numbers, curves(**small, dropout=0.2))
    assert eager == traced
    config = toy(**small, steps=1)
    assert run(start("torch", config), config)[0].loss != eager[0][0]


BLOCKS = {"n_layer": 1, "context": 128, "numerics": "fast", "autotune": "attention=blocks"}


@tier("rest", guard="a step with dropout is traced; the formats, uncompiled")
@pytest.mark.parametrize(
    ("said", "flags"),
    [
        ("", {"policy": "bf16", "fp32_islands": "blocks.1,head", "remat": "dots"}),
        ("", {"policy": "fp8-delayed", "n_layer": 3}),  # whose histories move as in eager mode
        ("", {"policy": "fp8", "n_layer": 3}),
        ("causal blocks", {"policy": "bf16", **BLOCKS}),
    ],
)
def test_features_are_traced_too(said: str, flags: dict[str, Any]) -> None:
    eager, traced = map(numbers, curves(said=said, **flags))
    assert eager == traced


needs_onednn = pytest.mark.skipif(cpu.LINEAR is None, reason="this torch has no oneDNN")


@tier("rest", guard="both ways in an eager step")
@pytest.mark.parametrize(
    ("policy", "way", "place", "name"),
    [
        pytest.param("fp32", "matmul=onednn", cpu, "LINEAR", marks=needs_onednn),
        ("bf16", "matmul=widened", cpu.F, "linear"),
    ],
)
def test_a_way_multiplies_in_a_compiled_step(
    monkeypatch: pytest.MonkeyPatch, policy: str, way: str, place: Any, name: str
) -> None:
    """And what a mode of remat keeps is not multiplied again."""
    linear = Mock(wraps=getattr(place, name))
    monkeypatch.setattr(place, name, linear)
    counts, losses = {}, []
    small: dict[str, Any] = {"policy": policy, "n_layer": 1, "steps": 3}
    small |= {"numerics": "fast", "autotune": way}
    for remat in ("none", "dots", "block"):
        twin = start("torch", config := toy(remat=remat, compile=True, **small))
        twin.prepare()
        linear.reset_mock()
        losses.append([result.loss for result in run(twin, config)])
        counts[remat] = linear.call_count
    eager = start("torch", config := toy(**small))
    losses.append([result.loss for result in run(eager, config)])
    assert 0 < counts["none"] == counts["dots"] < counts["block"]
    assert losses == 4 * losses[:1]
