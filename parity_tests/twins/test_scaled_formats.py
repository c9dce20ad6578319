"""Narrow formats over float16, whose gradients have a loss scale; evaluation by those scales."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lockstep.config import policy
from lockstep.data.batch import split_tokens
from parity_tests.pair import FRAMEWORKS, perturbed, run, start, toy, window
from parity_tests.tiers import tier

SMALL: dict[str, Any] = {"d_model": 16, "context": 8, "batch_size": 2, "accum": 2, "steps": 2}
# Nothing in float16 is left, but the loss scale is.
WIDE: dict[str, Any] = {
    "policy": "fp16", "formats": "blocks=fp8-delayed,*.mlp=fp8,head=fp8",
    "fp32_islands": "blocks.*.attend", "n_layer": 1,
} | SMALL  # fmt: skip


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_loss_scale_moves_no_number(framework: str) -> None:
    """Bit for bit, histories included: scales are powers of two."""
    ends = []
    for scale in (1.0, 2.0**12):
        config = toy(**WIDE | {"loss_scale_init": scale})
        twin = start(framework, config, perturbed(config))
        shape = (2, config.optim.batch_size, config.model.context + 1)
        for step in range(2):
            tokens = np.random.default_rng(step).integers(0, 256, shape, dtype=np.int32)
            twin.step(twin.place(split_tokens(tokens)))()
        ends.append(twin.state())
    one, other = ends
    assert other.loss_scale == 2.0**12
    assert set(one.amaxes) == {"blocks.0.attn.qkv", "blocks.0.attn.proj"}
    for name in one.amaxes:
        assert (one.amaxes[name][:, :2] > 0).all()
        np.testing.assert_array_equal(one.amaxes[name], other.amaxes[name])
    for name in one.mu:
        np.testing.assert_array_equal(one.mu[name], other.mu[name])


DELAYED: dict[str, Any] = {"policy": "fp8-delayed", "eval_policy": "fp8-delayed", "steps": 2}
# Formats that the evaluation has not: beside the same histories, and with histories of their own.
TRAINED = {"same": "head=fp8", "more": "blocks.0.mlp=fp8-delayed"}


@tier("rest", guard="the bug amaxes-of-skipped-step")
@pytest.mark.parametrize("formats", TRAINED.values(), ids=TRAINED)
def test_both_twins_scale_it_by_what_training_recorded(
    formats: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, where no sum of other order decides a rounding."""
    wide: Any = dict.fromkeys(("param", "compute", "output"), "float64")
    recipe = replace(policy.POLICIES["fp8-delayed"], **wide)
    monkeypatch.setitem(policy.POLICIES, "fp8-delayed", recipe)
    config = toy(**DELAYED, formats=formats)
    losses = []
    for framework in FRAMEWORKS:
        twin = start(framework, config, perturbed(config))
        run(twin, config)
        known = twin.evaluate(window(config, 2))
        twin.load(replace(twin.state(), amaxes={}))
        losses.append((known, twin.evaluate(window(config, 2))))
    ours, theirs = losses
    np.testing.assert_allclose(ours, theirs, rtol=1e-12)
    known, forgotten = ours
    assert abs(known - forgotten) > 1e-7  # scales of 1 would show


def test_logits_know_no_padding() -> None:
    """A scale of the whole tensor would: of these prefixes some have numbers that are subnormal."""
    config = toy(policy="fp64", formats="blocks=fp8", n_layer=1)
    state = perturbed(config)
    state.params["embed.weight"][0, 0] *= 1e3  # what a padded row would hold
    ours, theirs = (start(framework, config, state) for framework in FRAMEWORKS)
    for token in range(1, 256):
        prefix = np.array([token])
        gap = np.abs(ours.logits(prefix) - theirs.logits(prefix)).max()
        assert gap < 1e-12  # rounding in float64 is below 1e-15, a number that falls otherwise 1e-8
