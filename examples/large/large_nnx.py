"""`large_torch.py` in Flax NNX, for `lockstep check --forward`."""

import os
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

L, D = int(os.environ.get("LAYERS", "2")), int(os.environ.get("WIDTH", "64"))
V = 8 * D  # vocabulary


def linear(i: int, o: int, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(i, o, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=rngs)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(D, epsilon=1e-5, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16,
                                  rngs=rngs)  # fmt: skip
        self.up, self.down = linear(D, 4 * D, rngs), linear(4 * D, D, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.gelu(self.up(self.norm(x)), approximate=True))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(V, D, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(L)])
        self.head = linear(D, V, rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build(seed: int) -> nnx.Module:
    return Model(nnx.Rngs(seed))


def loss(model: Any, batch: jax.Array) -> jax.Array:
    logits = model(batch[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()
