"""N micro-batches are one batch of N times the size, in each framework."""

import numpy as np
import pytest

from parity_tests.pair import FAMILIES, FRAMEWORKS, norm_gap, perturbed, start, toy, window

# The norm rule of float64. The key's bias has a true gradient of zero where nothing rotates the
# keys, so what is left of it is rounding: a bias is held against its layer's largest bias gap.
BOUND = 1e-12


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_micro_batches_equal_one_batch(framework: str, family: str) -> None:
    common = {"policy": "fp64", "n_layer": 2, "steps": 3}
    split = toy(family, accum=4, batch_size=2, **common)
    whole = toy(family, accum=1, batch_size=8, **common)
    windows = [window(split, step) for step in range(3)]
    ends = []
    for config, rows in ((split, 2), (whole, 8)):
        twin = start(framework, config, perturbed(config))
        shape = (-1, rows, config.model.context + 1)
        results = [twin.step(twin.place(w.reshape(shape)))() for w in windows]
        ends.append((twin.state(), results))
    (a, a_results), (b, b_results) = ends
    for x, y in zip(a_results, b_results):
        assert abs(x.loss - y.loss) <= BOUND * abs(y.loss)
        assert abs(x.grad_norm - y.grad_norm) <= BOUND * y.grad_norm
    for field in ("params", "mu"):
        for name, array in getattr(a, field).items():
            gap = norm_gap(array, getattr(b, field)[name])
            assert gap <= BOUND, (field, name, gap)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_dropping_a_micro_batch_is_seen(framework: str) -> None:
    """The check can fail: three of four micro-batches are another gradient."""
    config = toy(policy="fp64", n_layer=2, accum=4, steps=1)
    tokens = window(config, 0)
    other = np.concatenate([tokens[:3], tokens[:1]])
    ends = []
    for w in (tokens, other):
        twin = start(framework, config, perturbed(config))
        twin.step(twin.place(w))()
        ends.append(twin.state())
    gaps = [norm_gap(a, ends[1].mu[name]) for name, a in ends[0].mu.items()]
    assert min(gaps) > 1e6 * BOUND
