"""A step is said to cost the same FLOPs in both twins, and bytes that are really there."""

import math
from typing import Any

import pytest

from lockstep.compile import expected as expected_matmuls
from lockstep.model.params import count, shapes
from lockstep.parity.toy import GROUPED
from parity_tests.pair import FRAMEWORKS, start, toy, window
from parity_tests.tiers import tier
from torch_ref.inspect.live import Live
from torch_ref.twin import TorchTwin

MODES = ("none", "sublayer", "block", "sqrt", "dots")


def flops(framework: str, **flags: Any) -> int:
    config = toy(**{"policy": "fp32", "n_layer": 4, **flags})
    return start(framework, config).step_flops(window(config, 0))


@tier("rest", guard="each count, by its formula")
def test_both_count_the_same_matmuls() -> None:
    plain = {framework: flops(framework) for framework in FRAMEWORKS}
    for remat in MODES[1:]:
        jax, torch = (flops(framework, remat=remat) for framework in FRAMEWORKS)
        assert jax == torch, remat
        assert plain["jax"] == plain["torch"] < jax


@pytest.mark.parametrize("flags", [{"lora_rank": 3}, {"freeze": "embed,blocks.0,head"}])
def test_what_is_frozen_costs_no_gradient(flags: dict[str, Any]) -> None:
    jax, torch = (flops(framework, n_layer=2, **flags) for framework in FRAMEWORKS)
    config = toy(policy="fp32", n_layer=2, **flags)
    frozen = shapes(config.model).keys() - {*config.trained, "embed.weight"}
    sizes = {name: math.prod(shapes(config.model)[name]) for name in frozen if "norm" not in name}
    tokens = config.optim.batch_size * config.model.context
    whole = flops("torch", n_layer=2)
    assert jax == torch < whole
    if "freeze" in flags:  # nor does the pass through layers before which nothing trains
        assert whole - torch > 2 * tokens * sum(sizes.values())


@pytest.mark.parametrize("flags", [{}, GROUPED], ids=["plain", "grouped"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_flops_follow_the_formula(framework: str, flags: dict[str, Any]) -> None:
    """6 for each weight of a matmul and each token; for attention 12 T Q a layer, unmasked."""
    flags = {name: value for name, value in flags.items() if name != "model"}
    config = toy(policy="fp32", accum=3, layers="scan", **flags)
    model, tokens = config.model, 3 * config.optim.batch_size * config.model.context
    matrices = (s for name, s in shapes(model).items() if len(s) == 2 and name != "embed.weight")
    weights = sum(map(math.prod, matrices))  # the embedding is looked up
    expected = 6 * weights + 12 * model.n_layer * model.context * model.d_queries
    counted = flops(framework, n_layer=model.n_layer, accum=3, layers="scan", **flags)
    assert counted == expected * tokens
    linears, head = expected_matmuls.linears(model).values(), model.d_vocab * model.d_model
    assert sum(a * b for a, b in linears) * model.n_layer + head == weights


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
