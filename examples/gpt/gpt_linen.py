"""The GPT of gpt_torch.py in Flax Linen, its layers scanned, kernels stacked: a port."""

import os
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

SIZES = {"full": (50257, 1024, 768, 12, 12), "layers": (61, 12, 24, 3, 12)}
# Vocabulary, context, width, heads, layers.
V, T, D, H, L = SIZES.get(os.environ.get("GPT2", ""), (61, 12, 24, 3, 2))
normal = nn.initializers.normal


def norm() -> nn.LayerNorm:
    return nn.LayerNorm(epsilon=1e-5, use_fast_variance=False)


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        b, t, _ = x.shape
        qkv = nn.Dense(3 * D, kernel_init=normal(0.02), name="qkv")(x)
        q, k, v = (part.reshape(b, t, H, D // H) for part in jnp.split(qkv, 3, axis=-1))
        scores = jnp.einsum("bthk,bshk->bhts", q, k) / (D // H) ** 0.5
        scores = jnp.where(jnp.tri(t, dtype=bool), scores, -jnp.inf)
        y = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores), v).reshape(b, t, D)
        return nn.Dense(D, kernel_init=normal(0.02 / (2 * L) ** 0.5), name="out")(y)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        x = x + Attention(name="attn")(norm()(x))
        y = nn.gelu(nn.Dense(4 * D, kernel_init=normal(0.02), name="fc")(norm()(x)))
        down = nn.Dense(D, kernel_init=normal(0.02 / (2 * L) ** 0.5), name="proj")
        return x + down(y), None


class GPT(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(V, D, embedding_init=normal(0.02), name="wte")
        positions = self.param("wpe", normal(0.02), (T, D))
        x = embed(tokens) + positions[: tokens.shape[1]]
        blocks = nn.scan(
            Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=L
        )  # fmt: skip
        x, _ = blocks(name="blocks")(x, None)
        return embed.attend(norm()(x))


def build(seed: int) -> Any:
    return GPT().init(jax.random.key(seed), jnp.zeros((1, T), int))


def loss(variables: Any, batch: jax.Array) -> jax.Array:
    logits = GPT().apply(variables, batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()
