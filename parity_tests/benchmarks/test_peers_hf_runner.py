"""Hugging Face's runners keep our names and state, evaluate as we do, and refuse what they lack."""

from dataclasses import replace
from typing import Any

import pytest

from lockstep.errors import UserError
from lockstep.judge.compare import changed_tensors
from lockstep.model.params import initial
from parity_tests.benchmarks.hf_runners import PEERS, load_runner
from parity_tests.pair import perturbed, toy


@pytest.mark.parametrize("peer", PEERS)
def test_a_state_comes_back_as_it_went_in(peer: str) -> None:
    config = toy("gpt2", policy="fp32")
    mu, nu = (initial(config.model, seed) for seed in (1, 2))
    state = replace(perturbed(config), mu=mu, nu=nu)
    back = load_runner(peer, config, state).state()
    assert changed_tensors(state, back) == []
    assert (back.step, back.updates, back.loss_scale, back.good_steps) == (0, 0, 1.0, 0)


@pytest.mark.parametrize("peer", PEERS)
def test_only_step_0_is_loaded(peer: str) -> None:
    config = toy("gpt2", policy="fp32")
    with pytest.raises(UserError, match="^step 3: .*; load a state at step 0$"):
        load_runner(peer, config, replace(perturbed(config), step=3, updates=3))


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"remat": "sqrt"}, "--remat sqrt: .*; use block or none"),
        ({"policy": "fp16"}, "--policy fp16: .* CPU; use --device cuda or --policy bf16"),
        ({"policy": "p=bf16,c=bf16,o=f32"}, "--policy p=bf16,c=bf16,o=f32: .*; use params=float32"),
        ({"model": "tiny", "policy": "fp64"}, "--policy fp64: .*Llama.*; use --policy fp32"),
        ({"bias": False}, "--model gpt2: none of .*bias False,.*; use another model"),
    ],
    ids=str,
)
def test_a_refusal_is_one_line(peer: str, flags: dict[str, Any], line: str) -> None:
    config = toy(**{"family": flags.get("model", "gpt2"), "policy": "bf16"} | flags)
    with pytest.raises(UserError, match=f"^{line}$"):
        PEERS[peer].build(config)
