"""Each planted bug of what is shared makes its check fail."""

from importlib import import_module

import pytest

from parity_tests.oracles import Call
from parity_tests.oracles.bugs import BUGS, Bug
from parity_tests.tiers import tier

# Each exports a graph, some of them two, or compiles two steps in JAX.
DEAR = {
    "int8-loss-of-float32", "int8-calibrated-on-one-window", "int8-calibrated-on-held-out",
    "onnx-rmsnorm-eps-by-default", "onnx-layernorm-eps-by-default", "stablehlo-eps-by-default",
    "onnx-last-place-as-the-one-before", "exported-at-another-step", "int8-zero-points-off",
    "onnx-without-adapters", "segments-count-from-0-jax", "segments-count-segments",
}  # fmt: skip


@tier("rest", guard="a Llama with adapters, exported", where=lambda bug: bug.name in DEAR)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug, monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    check = getattr(import_module(f"parity_tests.oracles.test_{bug.kind}"), bug.check)
    bug.plant(monkeypatch)
    with pytest.raises(AssertionError):
        call(check, *bug.given)
