"""Windows of which all targets count, or none.

The ladder climbs windows of which some count; the oracles have their loss.
"""

from typing import Any

import numpy as np
import pytest

from lockstep.data.batch import Batch, stack_batches
from lockstep.judge.compare import norm_rule
from lockstep.judge.verdict import Verdict
from parity_tests.pair import FRAMEWORKS, begin

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
