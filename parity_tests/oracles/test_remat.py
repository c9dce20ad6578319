"""Segments of layers: each layer keeps its own masks, however the layers are grouped."""

import pytest

from parity_tests.pair import perturbed, run, start, toy
from parity_tests.tiers import tier


@tier("rest", guard="rung 6", where=lambda framework: framework == "jax")
@pytest.mark.parametrize(
    ("framework", "layers"), [("torch", "unroll"), ("jax", "unroll"), ("jax", "scan")]
)
def test_segments_keep_their_masks(framework: str, layers: str) -> None:
    """With dropout a step's loss under `--remat sqrt` is that of a step that keeps everything: of
    two segments of two layers, and of one of two and one of three."""
    for n_layer in (4, 5):
        config = toy(n_layer=n_layer, n_head=1, d_model=8, context=8, vocab=256, policy="fp64",
                     steps=1, dropout=0.5, layers=layers)  # fmt: skip
        state, segmented = perturbed(config), config.replace(remat="sqrt")
        kept, recomputed = (run(start(framework, c, state), c)[0] for c in (config, segmented))
        assert kept.loss == pytest.approx(recomputed.loss, rel=1e-12)
        assert kept.grad_norm == pytest.approx(recomputed.grad_norm, rel=1e-12)
