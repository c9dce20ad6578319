"""Remat changes no bit of the gradients, with dropout on. (Rung 6 sees that it keeps less.)

But where XLA recomputes scanned layers under bf16: docs/decisions/0012.
"""

from typing import Any

import pytest

import torch_ref.remat
from lockstep.model.state import TrainState
from parity_tests.pair import begin, run
from parity_tests.tiers import tier

MODES = ("sublayer", "block", "sqrt", "dots")


def after_one_step(framework: str, remat: str, **flags: Any) -> TrainState:
    """The first moments after one step are the clipped gradients times 1 - beta1."""
    usual: dict[str, Any] = {"policy": "bf16", "steps": 1, "dropout": 0.2}
    twin = begin(framework, **usual | flags, remat=remat)
    run(twin, twin.config)
    return twin.state()


def assert_bitwise(a: TrainState, b: TrainState) -> None:
    for field in ("mu", "params"):
        for name, array in getattr(a, field).items():
            assert array.tobytes() == getattr(b, field)[name].tobytes(), (field, name)


@tier("rest", guard="rung 6, and torch's", where=lambda framework: framework == "jax")
@pytest.mark.parametrize(
    ("framework", "flags"),
    [
        ("jax", {"layers": "unroll", "n_layer": 2}),
        ("torch", {}),
        ("torch", {"policy": "fp32"}),
        ("torch", {"numerics": "fast"}),
    ],
    ids=str,
)
def test_gradients_are_bitwise_equal(framework: str, flags: dict[str, Any]) -> None:
    flags = {"n_layer": 4, **flags}  # sqrt: two segments of two; of two layers, one
    plain = after_one_step(framework, "none", **flags)
    for remat in MODES:
        assert_bitwise(after_one_step(framework, remat, **flags), plain)


def test_a_redrawn_mask_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: torch's generator not restored for the recomputed forward."""
    plain = after_one_step("torch", "none", numerics="fast")
    forgetful = torch_ref.remat.partial(torch_ref.remat.recompute, preserve_rng_state=False)
    monkeypatch.setattr(torch_ref.remat, "recompute", forgetful)
    redrawn = after_one_step("torch", "block", numerics="fast")
    with pytest.raises(AssertionError):
        assert_bitwise(redrawn, plain)
