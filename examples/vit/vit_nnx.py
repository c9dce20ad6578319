"""The ViT of vit_transformers.py in Flax NNX, channels last: a port."""

import os
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

S, P, D, H, F, L, K = 8, 4, 24, 3, 40, 2, 5  # side, patch, width, heads, mlp, layers, classes
if os.environ.get("VIT") == "full":
    S, P, D, H, F, L, K = 32, 8, 96, 6, 200, 12, 10
normal = nnx.initializers.normal(0.02)


def norm(rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(D, epsilon=1e-12, use_fast_variance=False, rngs=rngs)


def linear(i: int, o: int, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(i, o, kernel_init=normal, rngs=rngs)


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm1, self.norm2 = norm(rngs), norm(rngs)
        self.qkv, self.out = linear(D, 3 * D, rngs), linear(D, D, rngs)
        self.up, self.down = linear(D, F, rngs), linear(F, D, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        b, t, _ = x.shape
        q, k, v = (
            each.reshape(b, t, H, D // H) for each in jnp.split(self.qkv(self.norm1(x)), 3, -1)
        )
        x = x + self.out(jax.nn.dot_product_attention(q, k, v).reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norm2(x)), approximate=False))


class ViT(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.patches = nnx.Conv(3, D, (P, P), P, padding="VALID", kernel_init=normal, rngs=rngs)
        self.token = nnx.Param(normal(rngs.params(), (D,)))
        self.positions = nnx.Param(normal(rngs.params(), ((S // P) ** 2 + 1, D)))
        self.layers = nnx.List([Layer(rngs) for _ in range(L)])
        self.norm, self.head = norm(rngs), linear(D, K, rngs)

    def __call__(self, image: jax.Array) -> jax.Array:
        """(B, S, S, 3) -> (B, K)."""
        x = self.patches(image).reshape(len(image), -1, D)
        token = jnp.broadcast_to(self.token[...], (len(x), 1, D))
        x = jnp.concatenate([token, x], axis=1) + self.positions[...]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)[:, 0])


def build(seed: int) -> nnx.Module:
    return ViT(nnx.Rngs(seed))


def loss(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
    logits = model(batch["image"].transpose(0, 2, 3, 1))
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
