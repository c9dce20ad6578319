"""Dropout: transformers' GPT-2, whose own places of dropout get the masks of `jax.random`."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from lockstep.judge.compare import norm_gap
from parity_tests import hf_model
from parity_tests.pair import FRAMEWORKS, perturbed, start, toy, window

RATE, SEED, STEP = 0.3, 5, 7
EMBEDDING, ATTENTION, MLP = range(3)


class Mask(torch.nn.Module):
    """Stands for transformers' dropout; `layer` is 0 for the embedding."""

    def __init__(self, micro_step: int, layer: int, site: int) -> None:
        super().__init__()
        self.key = jax.random.key(SEED, impl="threefry2x32")
        for number in (STEP, micro_step, layer, site):
            self.key = jax.random.fold_in(self.key, number)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keep = jax.random.bernoulli(self.key, jnp.float32(1 - RATE), tuple(x.shape))
        return x * torch.from_numpy(np.array(keep)) / (1 - RATE)


def put_masks(net: Any, micro_step: int) -> None:
    net.transformer.drop = Mask(micro_step, 0, EMBEDDING)
    for layer, block in enumerate(net.transformer.h, 1):
        block.attn.resid_dropout = Mask(micro_step, layer, ATTENTION)
        block.mlp.dropout = Mask(micro_step, layer, MLP)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_dropout_matches_transformers(framework: str) -> None:
    """Behind the embedding and each sublayer what is dropped is drawn anew, by step, micro-step,
    layer and place, and the rest is scaled: the loss and the gradient are transformers'."""
    config = toy("gpt2", n_layer=2, d_model=16, context=8, policy="fp64", accum=2, clip=1e9,
                 dropout=RATE, seed=SEED)  # fmt: skip
    state, drawn = replace(perturbed(config), step=STEP - 1), window(config, 0)
    twin = start(framework, config, state)
    result = twin.step(twin.place(drawn))()
    net: Any = hf_model.build(config.model).double()
    hf_model.load(net, config.model, state.params)
    total = 0.0
    for micro_step, batch in enumerate(drawn.split()):
        put_masks(net, micro_step)
        tokens, targets = (torch.from_numpy(x).long() for x in batch[:2])
        logits = net(tokens).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, targets.flatten()) / 2
        loss.backward()
        total += loss.item()
    assert abs(result.loss - total) < 1e-12
    tenth = hf_model.translate(config.model, twin.state().mu)
    for name, parameter in net.named_parameters():
        assert norm_gap(10 * tenth[name], parameter.grad.numpy()) < 1e-12, name
