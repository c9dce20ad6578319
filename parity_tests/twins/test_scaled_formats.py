"""Narrow formats over float16, whose gradients have a loss scale."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lockstep.data.batch import split_tokens
from lockstep.judge.verdict import Verdict
from lockstep.parity import ladder, matrix
from lockstep.parity.case import Case
from lockstep.parity.ladder import RUNGS, WORLDS
from lockstep.parity.pair import GPT
from lockstep.parity.side import Side
from parity_tests.pair import FRAMEWORKS, perturbed, start, toy
from parity_tests.tiers import tier
from parity_tests.twins import test_native_formats as native
from parity_tests.twins.test_native_formats import SCALES, in_jax, in_torch

SMALL: dict[str, Any] = {"d_model": 16, "context": 8, "batch_size": 2, "accum": 2, "steps": 2}
# Nothing in float16 is left, but the loss scale is.
WIDE: dict[str, Any] = {
    "policy": "fp16", "formats": "blocks=fp8-delayed,*.mlp=nvfp4,head=fp8",
    "fp32_islands": "blocks.*.attend", "n_layer": 1,
} | SMALL  # fmt: skip
OVER = {"policy": "fp16", "formats": "blocks=fp8-delayed,*.mlp=mxfp8", "n_layer": 1}
CLIMBED = {n: OVER | {"accum": accum} for n, accum in ((1, 1), (3, 1), (4, 2), (7, 2), (8, 1))}
CLIMBED[WORLDS] = OVER | {"accum": 2, "mesh": "data=2"}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_loss_scale_moves_no_number(framework: str) -> None:
    """Bit for bit, histories included: scales are powers of two."""
    ends = []
    for scale in (1.0, 2.0**12):
        config = toy(**WIDE | {"loss_scale_init": scale})
        twin = start(framework, config, perturbed(config))
        shape = (2, config.optim.batch_size, config.model.context + 1)
        for step in range(2):
            window = np.random.default_rng(step).integers(0, 256, shape, dtype=np.int32)
            twin.step(twin.place(split_tokens(window)))()
        ends.append(twin.state())
    one, other = ends
    assert other.loss_scale == 2.0**12
    assert set(one.amaxes) == {"blocks.0.attn.qkv", "blocks.0.attn.proj"}
    for name in one.amaxes:
        assert (one.amaxes[name][:, :2] > 0).all()
        np.testing.assert_array_equal(one.amaxes[name], other.amaxes[name])
    for name in one.mu:
        np.testing.assert_array_equal(one.mu[name], other.mu[name])


@pytest.mark.parametrize("place", range(3), ids=["x", "weight", "gradient"])
@pytest.mark.parametrize("run", [in_jax, in_torch])
def test_an_infinity_that_is_clipped_shows(
    run: Callable, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the weight's gradient, so that the step is skipped."""
    given = dict(zip(("x", "weight", "bias", "dy"), native.operands()))
    given[("x", "weight", "dy")[place]][2, 1] = np.inf
    monkeypatch.setattr(native, "operands", lambda sizes: list(given.values()))
    y, dx, dweight, *_ = run("fp8-delayed", SCALES)
    assert np.isfinite(y).all() and np.isfinite(dx).all()
    assert not np.isfinite(dweight).any()


@tier("rest", guard="rung 7", where=lambda number: number != 7)
@pytest.mark.parametrize("number", CLIMBED)
def test_the_ladder_over_float16(number: int, device: str, sides: tuple[Side, Side]) -> None:
    config = matrix.config(CLIMBED[number], device)
    outcome = ladder.climb(RUNGS[number - 1], Case(pair=GPT, a=sides[0], b=sides[1], config=config))
    assert outcome.verdict is Verdict.EQUAL, str(outcome.worst)
