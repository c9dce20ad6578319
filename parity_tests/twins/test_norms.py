"""The gradient's norm by module: in float64 the same number in both twins, and the true one."""

from typing import Any

import numpy as np
import pytest

from lockstep.model.params import norms_by_module
from lockstep.twin import StepResult
from parity_tests.pair import FRAMEWORKS, begin, toy, window

FLAGS: dict[str, Any] = {
    "policy": "fp64",
    "n_layer": 2,
    "accum": 2,
    "n_head": 1,
    "d_model": 16,
    "context": 8,
}


def result_of(framework: str, **flags: Any) -> StepResult:
    config = toy(**FLAGS | flags)
    twin = begin(framework, **FLAGS | flags)
    return twin.step(twin.place(window(config, 0)))()


def true_norms(clip: float = np.inf) -> dict[str, float]:
    """Returns norms of the mean of the micro-batches' gradients, taken one by one."""
    twin = begin("torch", **FLAGS)
    each = [twin.loss_and_grads(batch)[1] for batch in window(toy(**FLAGS), 0).split()]
    grads = {name: np.mean([grads[name] for grads in each], axis=0) for name in each[0]}
    whole = np.sqrt(sum((g**2).sum() for g in grads.values()))
    factor = min(1.0, clip / (whole + 1e-6))
    return {name: float(np.linalg.norm(g)) * factor for name, g in grads.items()}


def largest_gap(norms: dict[str, float], truth: dict[str, float]) -> float:
    assert norms.keys() == truth.keys()
    return max(abs(norms[name] / truth[name] - 1) for name in truth)


@pytest.mark.parametrize(
    ("framework", "layers"), [("jax", "unroll"), ("jax", "scan"), ("torch", "unroll")]
)
def test_norms_are_those_of_the_window_s_gradient(framework: str, layers: str) -> None:
    found = result_of(framework, layers=layers)
    assert largest_gap(dict(found.norms), true_norms()) < 1e-12
    assert largest_gap(dict(found.norms), true_norms(clip=0.5)) > 0.1  # clipped ones are seen
    modules = norms_by_module(found.norms, toy(**FLAGS).model)
    assert list(modules)[:3] == ["embed", "blocks.0.norm1", "blocks.0.attn.qkv"]
    assert abs(np.linalg.norm(list(modules.values())) / found.grad_norm - 1) < 1e-12


def test_a_skipped_step_has_none() -> None:
    for framework in FRAMEWORKS:
        found = result_of(framework, policy="fp16", loss_scale_init=2.0**40, n_layer=1)
        assert (found.skipped, dict(found.norms)) == (True, {})
