"""An evaluation under delayed scaling, in other modules than those that train in it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lockstep.config import policy
from parity_tests.pair import FRAMEWORKS, perturbed, run, start, toy, window
from parity_tests.tiers import tier

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
