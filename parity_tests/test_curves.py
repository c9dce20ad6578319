"""In fp64 the two twins' curves are one curve, dropout and clipping included."""

import numpy as np
import pytest

from parity_tests.pair import FAMILIES, run, start, toy

REMAT = ("none", "sublayer", "block", "sqrt", "dots")

# float64 rounds at 1.1e-16; worst figures seen over 20 steps here: loss 1.8e-15, norm 8.2e-14.
LOSS_BOUND, NORM_BOUND = 1e-12, 1e-10


@pytest.mark.parametrize("remat", REMAT)
@pytest.mark.parametrize("accum", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_fp64_curves_agree(family: str, accum: int, remat: str) -> None:
    # Scanned and unrolled layers take turns, so that each family and mode meets both.
    layers = "scan" if (accum == 1) == (family == "tiny") else "unroll"
    config = toy(family, policy="fp64", accum=accum, remat=remat, layers=layers, dropout=0.1)
    jax, torch = (run(start(framework, config), config) for framework in ("jax", "torch"))
    losses, norms, rates = (
        np.array([[getattr(result, field) for result in results] for results in (jax, torch)])
        for field in ("loss", "grad_norm", "lr")
    )
    loss_gap, norm_gap = (np.abs(a - b).max() for a, b in (losses, norms))
    print(f"{family}, N={accum}, {remat}, {layers}: loss {loss_gap:.1e}, norm {norm_gap:.1e}")
    assert loss_gap <= LOSS_BOUND
    assert norm_gap <= NORM_BOUND
    assert (rates[0] == rates[1]).all()
    assert norms.min() > config.optim.clip  # clipping was active
    assert losses[0, -1] < losses[0, 0] - 0.5  # and something was learned
