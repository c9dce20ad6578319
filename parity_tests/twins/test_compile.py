"""`--compile`: one graph, the same numbers, and no recompilation from step to step.

The backend is the tracer's own (aot_eager): Inductor needs a C++ compiler, and what is tested here
is that the model and every remat mode can be traced whole.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch._dynamo.utils import counters

import torch_ref.step
from lockstep.twin import StepResult
from parity_tests.pair import run, start, toy
from parity_tests.tiers import tier
from torch_ref.extra import cpu

# The tracer itself makes an instance of an autograd.Function, which torch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@pytest.fixture(autouse=True)
def traced_whole(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    compiled = partial(torch.compile, backend="aot_eager", fullgraph=True)
    monkeypatch.setattr(torch_ref.step.torch, "compile", compiled)
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
        ("", {"policy": "mxfp8", "n_layer": 3}),
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
