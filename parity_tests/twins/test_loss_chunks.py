"""`--loss-chunks`: the loss and gradients without it, in every policy, and less memory."""

from functools import partial
from itertools import pairwise

import pytest

from lockstep.config import chunks
from lockstep.data.batch import blank_window
from lockstep.judge.tolerances import epsilon
from parity_tests.pair import FRAMEWORKS, largest_gap, perturbed, random_batch, start, toy
from parity_tests.tiers import tier

POLICIES = [
    ("fp64", "gpt2"),
    ("fp64", "tiny"),
    ("fp32", "gpt2"),
    ("bf16", "gpt2"),
    ("fp16", "tiny"),
]


@tier(
    "rest",
    guard="fp64 of gpt2; half precision",
    where=lambda policy, family: (policy, family) in (("fp64", "tiny"), ("fp32", "gpt2")),
)
@pytest.mark.parametrize(("policy", "family"), POLICIES)
def test_chunks_are_the_whole(policy: str, family: str) -> None:
    """34 rows in chunks of 12, 12 and 10, token 0 among the targets. The gradient of the head's
    weights is a sum of chunks, each rounded by half an ulp; float32 sums come in another order (2.4
    ulps seen)."""
    batch = random_batch(2, 17, vocab=8)
    assert not batch.targets.all()
    configs = [toy(family, policy=policy, n_layer=1, context=17, loss_chunks=n) for n in "13"]
    state = perturbed(configs[0])
    compute, single = configs[0].precision.roles.compute, epsilon("float32")
    exact = policy == "fp64"
    bounds = (1e-12, 1e-12) if exact else (4 * single, 2 * epsilon(compute) + 8 * single)
    found = [[start(f, c, state).loss_and_grads(batch) for c in configs] for f in FRAMEWORKS]
    across = [[in_chunks for _, in_chunks in found]] if exact else []
    for (loss, grads), (other, others) in [*found, *across]:
        assert abs(loss - other) <= bounds[0] * loss
        assert largest_gap(others, grads) <= bounds[1]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_only_a_chunk_s_logits_are_kept(framework: str) -> None:
    """All of them are 8 MB in float32, and more than one copy is needed."""
    make = partial(toy, n_layer=1, context=64, vocab=8192, batch_size=4, policy="fp32")
    window = blank_window(make())
    needed = [start(framework, make(loss_chunks=n)).step_bytes(window) for n in ("1", "4", "16")]
    assert all(less < most for most, less in pairwise(needed)), needed
    assert needed[0] - needed[1] > 8e6, needed


def test_auto_cuts_where_the_logits_are_many() -> None:
    gpt2 = partial(toy, "gpt2", vocab=50_304, context=1024, loss_chunks="auto")
    assert [gpt2(batch_size=n).chunks for n in (1, 2, 3, 64)] == [1, 1, 2, 32]
    assert toy(loss_chunks="auto").chunks == 1
    assert toy(loss_chunks="1000").chunks == 32  # no more than rows


def test_the_last_chunk_has_what_is_left() -> None:
    assert chunks.sizes(34, 3) == [12, 12, 10]
    assert chunks.sizes(32, 1) == [32]
    assert chunks.sizes(10, 6) == [2] * 5
