"""The BERT of bert_transformers.py in Flax NNX; attention has an axis for heads. A port."""

import os
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

V, T, D, H, F, L = 59, 10, 24, 4, 40, 2  # vocabulary, positions, width, heads, mlp, layers
if os.environ.get("BERT") == "full":
    V, T, D, H, F, L = 300, 64, 96, 8, 200, 12
normal = nnx.initializers.normal(0.02)


def norm(rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(D, epsilon=1e-12, use_fast_variance=False, rngs=rngs)


def linear(i: int, o: int, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(i, o, kernel_init=normal, rngs=rngs)


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention = nnx.MultiHeadAttention(H, D, kernel_init=normal, decode=False, rngs=rngs)
        self.norm1, self.norm2 = norm(rngs), norm(rngs)
        self.up, self.down = linear(D, F, rngs), linear(F, D, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.down(nnx.gelu(self.up(x), approximate=False)))


class Bert(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.words = nnx.Embed(V, D, embedding_init=normal, rngs=rngs)
        self.positions = nnx.Embed(T, D, embedding_init=normal, rngs=rngs)
        self.types = nnx.Embed(2, D, embedding_init=normal, rngs=rngs)
        self.norm = norm(rngs)
        self.layers = nnx.List([Layer(rngs) for _ in range(L)])
        self.transform, self.transform_norm = linear(D, D, rngs), norm(rngs)
        self.bias = nnx.Param(jnp.zeros(V))

    def __call__(self, words: jax.Array, types: jax.Array) -> jax.Array:
        positions = self.positions(jnp.arange(words.shape[1]))
        x = self.norm(self.words(words) + self.types(types) + positions)
        for layer in self.layers:
            x = layer(x)
        x = self.transform_norm(nnx.gelu(self.transform(x), approximate=False))
        return self.words.attend(x) + self.bias[...]


def build(seed: int) -> nnx.Module:
    return Bert(nnx.Rngs(seed))


def loss(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
    logits = model(batch["words"], batch["types"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()
