"""Windows of which not all targets count: a mean over those of the whole window that do."""

from typing import Any

import numpy as np
import pytest

from lockstep.data.batch import Batch, stack_batches
from lockstep.judge.compare import norm_rule
from lockstep.judge.verdict import Verdict
from parity_tests.pair import FRAMEWORKS, begin
from parity_tests.tiers import tier

ROWS, CONTEXT = 8, 16
PLAIN: dict[str, Any] = {"n_layer": 1, "policy": "fp64", "context": CONTEXT}


def make_batch(counted: np.ndarray) -> Batch:
    """(8, T): of row i the first counted[i] targets count."""
    generator = np.random.Generator(np.random.Philox(0))
    tokens = generator.integers(256, size=(ROWS, CONTEXT + 1)).astype(np.int32)
    counts = np.arange(CONTEXT) < counted[:, None]
    return Batch(tokens[:, :-1], np.where(counts, tokens[:, 1:], 0), counts)


def split(batch: Batch, n: int) -> Batch:
    """(8, T) -> (N, 8 / N, T)"""
    rows = np.split(np.arange(len(batch.tokens)), n)
    return stack_batches([batch.select(some) for some in rows])


# By 8 and by 2: micro-batches without any.
UNEVEN = make_batch(np.array([16, 3, 0, 0, 1, 16, 9, 0]))


def updated(framework: str, batch: Batch, n: int, **flags: object) -> dict[str, np.ndarray]:
    twin = begin(framework, **{**PLAIN, "accum": n, "batch_size": ROWS // n, **flags})
    result = twin.step(twin.place(split(batch, n)))()
    state = twin.state()
    return {**state.mu, "loss": np.array(result.loss), "grad norm": np.array(result.grad_norm)}


@tier("rest", guard="one chunk", where=lambda chunks: chunks == "3")
@pytest.mark.parametrize("chunks", ["1", "3"])
def test_micro_batches_are_one_batch(chunks: str) -> None:
    """N = 1, 2 and 8, in both: a target weighs the same in whichever micro-batch it stands."""
    one, *others = [
        updated(framework, UNEVEN, n, loss_chunks=chunks)
        for framework in FRAMEWORKS
        for n in (1, 2, 8)
    ]
    for other in others:
        for finding in norm_rule(other, one):
            assert finding.verdict is Verdict.EQUAL, finding
    means = [updated("torch", UNEVEN.select([i]), 1, batch_size=1)["loss"] for i in (0, 1)]
    both = updated("torch", UNEVEN.select([0, 1]), 1, batch_size=2)["loss"]
    assert abs(np.mean(means) - both) > 0.01


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_ignored_targets_have_no_part(framework: str) -> None:
    """The loss by hand, of the logits; whatever token stands behind an ignored target."""
    twin = begin(framework, **PLAIN, batch_size=ROWS)
    logits = twin.trace(UNEVEN).activations["logits"]
    losses = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(
        logits, UNEVEN.targets[..., None], -1
    ).squeeze(-1)
    loss, grads = twin.loss_and_grads(UNEVEN)
    assert abs(loss - losses[UNEVEN.counts].mean()) < 1e-13
    assert abs(twin.evaluate(split(UNEVEN, 4)) - loss) < 1e-13
    assert np.abs(grads["head.weight"]).max() > 0


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_where_all_count_it_is_the_plain_loss(framework: str) -> None:
    """Another program, and the same numbers up to rounding."""
    full = make_batch(np.full(ROWS, CONTEXT))
    plain = full._replace(counts=None)
    twin = begin(framework, **PLAIN, batch_size=ROWS)
    (a, ours), (b, theirs) = (twin.loss_and_grads(batch) for batch in (full, plain))
    assert abs(a - b) < 1e-13
    assert all(f.verdict is Verdict.EQUAL for f in norm_rule(ours, theirs))


@pytest.mark.parametrize("policy", ["fp64", "fp16"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_window_without_any_target(framework: str, policy: str) -> None:
    """Its loss and its gradient are 0, and the step is taken: no NaN, no skip."""
    twin = begin(framework, **{**PLAIN, "policy": policy, "accum": 2, "batch_size": ROWS // 2})
    result = twin.step(twin.place(split(make_batch(np.zeros(ROWS)), 2)))()
    assert (result.loss, result.grad_norm, result.skipped) == (0, 0, False)
    assert twin.state().updates == 1
