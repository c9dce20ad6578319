"""The GPT of gpt_torch.py in Flax NNX, as one brings it to `lockstep check`: a port."""

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

SIZES = {"full": (50257, 1024, 768, 12, 12), "layers": (61, 12, 24, 3, 12)}
# Vocabulary, context, width, heads, layers.
V, T, D, H, L = SIZES.get(os.environ.get("GPT2", ""), (61, 12, 24, 3, 2))
normal = nnx.initializers.normal


def linear(i: int, o: int, rngs: nnx.Rngs, std: float = 0.02) -> nnx.Linear:
    return nnx.Linear(i, o, kernel_init=normal(std), rngs=rngs)


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.q = linear(D, D, rngs)
        self.k = linear(D, D, rngs)
        self.v = linear(D, D, rngs)
        self.out = linear(D, D, rngs, 0.02 / (2 * L) ** 0.5)

    def __call__(self, x: jax.Array) -> jax.Array:
        b, t, _ = x.shape
        q, k, v = (f(x).reshape(b, t, H, D // H) for f in (self.q, self.k, self.v))
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.reshape(b, t, D))


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = linear(D, 4 * D, rngs)
        self.down = linear(4 * D, D, rngs, 0.02 / (2 * L) ** 0.5)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.gelu(self.up(x), approximate=True))


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm1 = nnx.LayerNorm(D, epsilon=1e-5, use_fast_variance=False, rngs=rngs)
        self.attention = Attention(rngs)
        self.norm2 = nnx.LayerNorm(D, epsilon=1e-5, use_fast_variance=False, rngs=rngs)
        self.mlp = MLP(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.tokens = nnx.Embed(V, D, embedding_init=normal(0.02), rngs=rngs)
        self.positions = nnx.Embed(T, D, embedding_init=normal(0.02), rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(L)])
        self.norm = nnx.LayerNorm(D, epsilon=1e-5, use_fast_variance=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.tokens.attend(self.norm(x))


def build(seed: int) -> nnx.Module:
    return GPT(nnx.Rngs(seed))


def loss(model: Any, batch: jax.Array) -> jax.Array:
    logits = model(batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


def batch(step: int) -> np.ndarray:
    return np.random.default_rng(step).integers(0, V, (4, T + 1))


def clip(limit: float) -> optax.GradientTransformation:
    """As `clip_grad_norm_`, which adds 1e-6 to the norm; `optax.clip_by_global_norm` does not."""

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        scale = jnp.minimum(1.0, limit / (optax.tree.norm(grads) + 1e-6))
        return jax.tree.map(lambda g: g * scale, grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def optimizer(model: nnx.Module) -> optax.GradientTransformation:
    def decayed(params: Any) -> Any:
        return jax.tree.map(lambda x: x.ndim >= 2, params)

    return optax.chain(clip(1.0), optax.adamw(1e-3, 0.9, 0.95, weight_decay=0.1, mask=decayed))
