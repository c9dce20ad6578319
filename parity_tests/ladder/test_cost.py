"""What a step is said to cost: the same FLOPs in both twins, and bytes that are really there."""

from typing import Any

import pytest

from lockstep.model.params import count
from parity_tests.pair import FAMILIES, FRAMEWORKS, start, toy, window
from torch_ref.live import Live
from torch_ref.train import TorchTwin

MODES = ("none", "sublayer", "block", "sqrt", "dots")


def flops(framework: str, **flags: Any) -> int:
    config = toy(flags.pop("family", "tiny"), **{"policy": "fp32", "n_layer": 4, **flags})
    return start(framework, config).step_flops(window(config, 0))


@pytest.mark.parametrize("model", FAMILIES)
def test_both_count_the_same_matmuls(model: str) -> None:
    plain = {framework: flops(framework, family=model) for framework in FRAMEWORKS}
    for remat in MODES[1:]:
        jax, torch = (flops(framework, family=model, remat=remat) for framework in FRAMEWORKS)
        assert jax == torch, remat
        assert plain["jax"] == plain["torch"] < jax


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_flops_follow_the_formula(framework: str) -> None:
    """6 for each weight of a matmul and each token; for attention 12 T D a layer, unmasked."""
    config = toy(policy="fp32", accum=3, layers="scan")
    model, tokens = config.model, 3 * config.optim.batch_size * config.model.context
    norms = (2 * model.n_layer + 1) * model.d_model
    weights = count(model) - norms - model.vocab * model.d_model  # the embedding is looked up
    expected = 6 * weights + 12 * model.n_layer * model.context * model.d_model
    counted = flops(framework, n_layer=model.n_layer, accum=3, layers="scan")
    assert counted == expected * tokens


def test_a_view_of_a_weight_is_no_new_memory() -> None:
    config = toy(policy="fp32")
    twin = start("torch", config)
    assert isinstance(twin, TorchTwin)
    with Live() as live:
        twin.trainer.accumulate(twin.place(window(config, 0)))
    assert live.bytes == 4 * count(config.model)  # the gradients are what is left
    assert live.peak > live.bytes
    twin.trainer.optimizer.zero_grad(set_to_none=True)
    assert live.bytes == 0
