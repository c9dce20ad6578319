"""The forward pass in StableHLO, for `lockstep.weights.stablehlo`, which knows no JAX."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array, export
from safetensors.numpy import load_file

from lockstep.config import Config
from lockstep.data.batch import Batch
from lockstep.weights.forward import WEIGHTS
from lockstep.weights.stablehlo import PROGRAM, TEXT

from ..extra.capabilities import find_capabilities
from ..extra.device import configure
from ..extra.rules import make_model
from ..step import Params
from . import bridge

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def forward(
    config: Config, weights: dict[str, np.ndarray], platforms: Sequence[str] = PLATFORMS
) -> export.Exported:
    """Weights by canonical name, and tokens (B, T) int32 -> logits (B, T, V) float32; B and T are
    free, T up to the context. Attention is written out: no kernel is of one platform alone."""
    capabilities = find_capabilities(configure(config))
    model = make_model(config, config.dtypes, capabilities)

    def logits(weights: Params, tokens: Array) -> Array:
        turned = {name: bridge.turn(name, array) for name, array in weights.items()}
        return model(turned)(Batch(tokens, tokens))

    sizes = export.symbolic_shape("B, T", constraints=[f"T <= {config.model.context}"])
    tokens = jax.ShapeDtypeStruct(sizes, np.int32)
    given = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in weights.items()}
    return export.export(jax.jit(logits), platforms=platforms)(given, tokens)


def export_forward(config: dict[str, Any], folder: str) -> None:
    """Writes the program, as jax.export writes it and as text, beside the canonical weights."""
    parsed, there = Config.from_json(config), Path(folder)
    weights = load_file(there / WEIGHTS)
    (there / PROGRAM).write_bytes(forward(parsed, weights).serialize())
    plain = forward(parsed, weights, ["cpu"])  # of several, each call says for which it is
    (there / TEXT).write_text(plain.mlir_module(), encoding="utf-8")
