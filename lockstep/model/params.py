"""The canonical parameters: ordered names, shapes, and the initial weights from a seed.

Names and layouts are those of the PyTorch state-dict (a weight is out x in); the JAX bridge
transposes. Everything that passes between the twins (weights, moments, gradients) is a dict keyed
by these names.
"""

import math
import zlib
from collections.abc import Mapping

import numpy as np

from lockstep.config import ModelConfig, islands
from lockstep.config.tensors import ADAPTERS
from lockstep.config.tensors import shapes as shapes

Arrays = dict[str, np.ndarray]


def initial(model: ModelConfig, seed: int, given: Arrays | None = None) -> Arrays:
    """Draws float32 weights as GPT-2 does: N(0, .02), residual projections times 1/sqrt(2L).

    An adapter's are drawn as PEFT does: A is uniform within 1/sqrt(d_in), B zero, so that it adds
    nothing yet.

    Each tensor has a generator of its own, keyed by seed and name: adding one changes no other.
    """
    given = given or {}
    return {
        name: given[name] if name in given else _initial(name, shape, model, seed)
        for name, shape in shapes(model).items()
    }


def _initial(name: str, shape: tuple[int, ...], model: ModelConfig, seed: int) -> np.ndarray:
    if name.endswith((".bias", ".lora_b")):
        return np.zeros(shape, np.float32)
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    generator = np.random.Generator(np.random.Philox(key=[seed, zlib.crc32(name.encode())]))
    if name.endswith(".lora_a"):
        uniform = generator.random(shape, np.float32) * np.float32(2) - np.float32(1)
        return uniform * np.float32(shape[1] ** -0.5)
    residual = name.endswith(("attn.proj.weight", "mlp.down.weight"))
    std = 0.02 / math.sqrt(2 * model.n_layer) if residual else 0.02
    return generator.standard_normal(shape, np.float32) * np.float32(std)


def decays(name: str, patterns: str = "") -> bool:
    """Says if weight decay applies to a tensor: to all matrices, or those of these patterns.

    It never applies to norms, biases or embeddings.
    """
    matrix = name.endswith(
        (".qkv.weight", ".proj.weight", ".gate.weight", ".up.weight", ".down.weight", "head.weight",
         *ADAPTERS)
    )  # fmt: skip
    return matrix and (not patterns or islands.match(patterns, name))


def intermediates(model: ModelConfig) -> list[str]:
    """Names the activations that both twins can return, in the order of the forward pass."""
    inside = ("norm1", "attn", "norm2", "mlp")
    blocks = (
        [*(f"blocks.{i}.{part}" for part in inside), f"blocks.{i}"] for i in range(model.n_layer)
    )
    return ["embed", *(name for block in blocks for name in block), "norm", "logits"]


def norms_by_module(norms: Mapping[str, float], model: ModelConfig) -> dict[str, float]:
    """Joins tensors' norms to those of modules, in the order of the forward pass."""
    squares: dict[str, float] = {}
    for name in filter(norms.__contains__, shapes(model)):
        module = name.rpartition(".")[0]
        squares[module] = squares.get(module, 0.0) + norms[name] ** 2
    return {module: math.sqrt(square) for module, square in squares.items()}


def count(model: ModelConfig) -> int:
    """Counts the parameters; a tied head counts once."""
    return sum(math.prod(shape) for shape in shapes(model).values())
