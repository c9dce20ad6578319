"""The canonical parameters: ordered names, shapes, and the initial weights from a seed.

Names and layouts are those of the PyTorch state-dict (a weight is out x in); the JAX bridge
transposes. Everything that passes between the twins (weights, moments, gradients) is a dict keyed
by these names.
"""

import math
import zlib
from collections.abc import Iterable, Mapping

import numpy as np

from lockstep.config import ModelConfig, islands

Arrays = dict[str, np.ndarray]


def shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape, in the order of the forward pass."""
    d, f, v, k = model.d_model, model.d_mlp, model.d_vocab, model.d_head
    out: dict[str, tuple[int, ...]] = {"embed.weight": (v, d)}
    if model.position == "learned":
        out["position.weight"] = (model.context, d)

    def norm(name: str) -> None:
        out[f"{name}.weight"] = (d,)
        if model.norm == "layernorm" and model.bias:
            out[f"{name}.bias"] = (d,)

    def linear(name: str, d_out: int, d_in: int, bias: bool = model.bias) -> None:
        out[f"{name}.weight"] = (d_out, d_in)
        if bias:
            out[f"{name}.bias"] = (d_out,)

    for i in range(model.n_layer):
        norm(f"blocks.{i}.norm1")
        linear(f"blocks.{i}.attn.qkv", model.d_qkv, d, model.bias or model.qkv_bias)
        if model.qk_norm:
            out |= {f"blocks.{i}.attn.{each}_norm.weight": (k,) for each in "qk"}
        linear(f"blocks.{i}.attn.proj", d, model.d_queries)
        norm(f"blocks.{i}.norm2")
        if model.mlp == "swiglu":
            linear(f"blocks.{i}.mlp.gate", f, d)
        linear(f"blocks.{i}.mlp.up", f, d)
        linear(f"blocks.{i}.mlp.down", d, f)
    norm("norm")
    if not model.tied:
        out["head.weight"] = (v, d)
    return out


def initial(model: ModelConfig, seed: int) -> Arrays:
    """float32 weights by GPT-2's recipe: N(0, .02), residual projections scaled by 1/sqrt(2L).

    Each tensor has a generator of its own, keyed by seed and name: adding one changes no other.
    """
    return {name: _initial(name, shape, model, seed) for name, shape in shapes(model).items()}


def _initial(name: str, shape: tuple[int, ...], model: ModelConfig, seed: int) -> np.ndarray:
    if name.endswith(".bias"):
        return np.zeros(shape, np.float32)
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    residual = name.endswith(("attn.proj.weight", "mlp.down.weight"))
    std = 0.02 / math.sqrt(2 * model.n_layer) if residual else 0.02
    generator = np.random.Generator(np.random.Philox(key=[seed, zlib.crc32(name.encode())]))
    return generator.standard_normal(shape, np.float32) * np.float32(std)


def decays(name: str, patterns: str = "") -> bool:
    """Whether weight decay applies: to all matrices, or those of these patterns; never to norms,
    biases or embeddings."""
    matrix = name.endswith(
        (".qkv.weight", ".proj.weight", ".gate.weight", ".up.weight", ".down.weight", "head.weight")
    )
    return matrix and (not patterns or islands.match(patterns, name))


def intermediates(model: ModelConfig) -> list[str]:
    """Names of the activations that both twins can show, in the order of the forward pass."""
    inside = ("norm1", "attn", "norm2", "mlp")
    blocks = (
        [*(f"blocks.{i}.{part}" for part in inside), f"blocks.{i}"] for i in range(model.n_layer)
    )
    return ["embed", *(name for block in blocks for name in block), "norm", "logits"]


def first_nonfinite(finite: Iterable[tuple[str, bool]], model: ModelConfig) -> str:
    """Of tensors' names, and whether their gradients are finite: the module whose gradient is the
    backward pass's first that is not; "" where all are."""
    order = list(dict.fromkeys(name.rpartition(".")[0] for name in shapes(model)))
    modules = {name.rpartition(".")[0] for name, is_finite in finite if not is_finite}
    return max(modules, key=order.index, default="")


def norms_by_module(norms: Mapping[str, float], model: ModelConfig) -> dict[str, float]:
    """Of tensors' norms those of the modules, in the order of the forward pass."""
    squares: dict[str, float] = {}
    for name in filter(norms.__contains__, shapes(model)):
        module = name.rpartition(".")[0]
        squares[module] = squares.get(module, 0.0) + norms[name] ** 2
    return {module: math.sqrt(square) for module, square in squares.items()}


def count(model: ModelConfig) -> int:
    """Parameters, a tied head counted once."""
    return sum(math.prod(shape) for shape in shapes(model).values())
