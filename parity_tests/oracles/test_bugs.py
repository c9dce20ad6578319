"""Each planted bug of what is shared makes its check fail."""

from importlib import import_module

import pytest

from parity_tests.oracles import Call
from parity_tests.oracles.bugs import BUGS, Bug
from parity_tests.tiers import tier

# Each exports a program or compiles one, as its check does in `make test`.
DEAR = {
    "stablehlo-eps-by-default", "exported-at-another-step", "adapters-merged-unscaled",
    "onnx-layernorm-eps-by-default", "onnx-rmsnorm-eps-by-default",
    "onnx-last-place-as-the-one-before", "int8-calibrated-on-one-window",
    "int8-calibrated-on-held-out", "int8-loss-of-float32", "int8-zero-points-off",
    "onnx-without-adapters", "stale-evaluation-weights-jax",
    "segments-count-from-0-jax", "segments-count-segments", "adam-counts-steps-after-resume",
}  # fmt: skip


@tier("rest", guard="the check, and other bugs of its kind", where=lambda bug: bug.name in DEAR)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug, monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    check = getattr(import_module(f"parity_tests.oracles.test_{bug.kind}"), bug.check)
    bug.plant(monkeypatch)
    with pytest.raises(AssertionError):
        call(check, *bug.given)
