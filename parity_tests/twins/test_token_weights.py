"""A window of which no target counts.

The ladder climbs windows of which some count; the oracles have their loss.
"""

import pytest

from lockstep.data.batch import blank_window
from parity_tests.pair import FRAMEWORKS, begin


@pytest.mark.parametrize("policy", ["fp64", "fp16"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_window_without_any_target(framework: str, policy: str) -> None:
    """Its loss and its gradient are 0, and the step is taken: no NaN, no skip."""
    twin = begin(framework, n_layer=1, policy=policy, context=16, accum=2)
    window = blank_window(twin.config)
    result = twin.step(twin.place(window._replace(counts=window.tokens > 0)))()
    assert (result.loss, result.grad_norm, result.skipped) == (0, 0, False)
    assert twin.state().updates == 1
