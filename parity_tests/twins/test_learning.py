"""Every policy learns, in both twins: more than how often each byte comes."""

from typing import Any

import pytest

from lockstep.config import Config
from lockstep.config.policy import POLICIES
from lockstep.data import batches, corpus
from parity_tests.pair import FRAMEWORKS, run, start, toy
from parity_tests.tiers import tier

# Of its time most is compilation, and torch multiplies float16 on a CPU at about 1 GFLOP/s.
SMALL: dict[str, Any] = {
    "n_layer": 1, "d_model": 32, "context": 16, "batch_size": 8, "steps": 80, "lr": 1e-2,
    "clip": 1.0,
}  # fmt: skip
FULL = ("fp64", "fp32", "tf32", "fp8", "fp8-rowwise", "mxfp8")


def short_run(policy: str) -> Config:
    layers = {"n_layer": 3} if POLICIES[policy].recipe else {}  # not of the first and the last
    return toy(policy=policy, numerics="fast", **SMALL | layers)


@tier("full", guard="bf16 and nvfp4", where=lambda policy: policy in FULL)
@tier("rest", guard="bf16", where=lambda policy: policy not in ("bf16", *FULL))
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_validation_loss_falls_below_the_unigram_entropy(framework: str, policy: str) -> None:
    config = short_run(policy)
    data = corpus.load("stdlib")
    held_out = batches.window(data.val, accum=8, seed=0, split="val", step=0, batch_size=16,
                              context=config.model.context)  # fmt: skip
    twin = start(framework, config)
    before = twin.evaluate(held_out)
    run(twin, config)
    after = twin.evaluate(held_out)
    entropy = corpus.unigram_entropy(data)
    assert entropy is not None
    assert after < entropy < before
