"""Remat changes no bit of the gradients, with dropout on. (Rung 6 sees that it keeps less.)

But where XLA recomputes scanned layers under bf16: docs/decisions/0012.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_impl.remat
import torch_ref.remat
from jax_impl.extra import scan
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


def test_sqrt_gives_each_layer_its_own_index() -> None:
    """Three segments, of three, three and four layers. Dropout's masks are drawn by the layer's
    index, in the forward pass and when a segment is recomputed."""

    def layer(block: Any, index: Any, x: Any) -> Any:
        return x * (block + index / 10)

    weights = np.linspace(0.5, 1.4, 10)
    factors = weights + np.arange(10) / 10
    derivatives = np.prod(factors) / factors
    for through in (jax_impl.remat.through_blocks, scan.scan_blocks):
        stacked = jnp.asarray(weights)

        def run(blocks: Any, through: Any = through) -> Any:
            listed = blocks if through is scan.scan_blocks else list(blocks)
            return through(layer, listed, jnp.ones(()), remat="sqrt")

        np.testing.assert_allclose(jax.grad(run)(stacked), derivatives, rtol=1e-5)
    blocks = [torch.tensor(weight, requires_grad=True) for weight in weights]
    torch_ref.remat.through_blocks(layer, blocks, torch.ones(()), remat="sqrt").backward()
    grads = [block.grad for block in blocks if block.grad is not None]
    np.testing.assert_allclose(grads, derivatives, rtol=1e-5)
