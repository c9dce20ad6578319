"""The Llama of llama_transformers.py in Equinox, one text at a time under `jax.vmap`: a port."""

from typing import Any

import equinox as eqx
import jax
import optax
from llama_jax import D, F, G, K, L, V, attend

keep: Any = lambda name, x: x  # noqa: E731


def taps(tap: Any) -> None:
    global keep
    keep = tap


def linear(i: int, o: int, key: jax.Array) -> eqx.nn.Linear:
    made = eqx.nn.Linear(i, o, use_bias=False, key=key)
    return eqx.tree_at(lambda m: m.weight, made, 0.02 * jax.random.normal(key, (o, i)))


class Block(eqx.Module):
    name: str
    input_norm: eqx.nn.RMSNorm
    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    out: eqx.nn.Linear
    mlp_norm: eqx.nn.RMSNorm
    gate: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, name: str, key: jax.Array) -> None:
        a, b, c, d, e, f, g = jax.random.split(key, 7)
        self.name = name
        self.input_norm, self.mlp_norm = (eqx.nn.RMSNorm(D, use_bias=False) for _ in range(2))
        self.query, self.out = linear(D, D, a), linear(D, D, b)
        self.key, self.value = linear(D, G * K, c), linear(D, G * K, d)
        self.gate, self.up, self.down = linear(D, F, e), linear(D, F, f), linear(F, D, g)

    def __call__(self, x: jax.Array) -> jax.Array:
        """(T, D) -> (T, D)."""
        y = keep(f"{self.name}.input_norm", jax.vmap(self.input_norm)(x))
        q, k, v = (
            jax.vmap(f)(y).reshape(len(x), -1, K) for f in (self.query, self.key, self.value)
        )
        x = x + keep(f"{self.name}.attn", jax.vmap(self.out)(attend(q, k, v).reshape(x.shape)))
        y = keep(f"{self.name}.mlp_norm", jax.vmap(self.mlp_norm)(x))
        y = jax.nn.silu(jax.vmap(self.gate)(y)) * jax.vmap(self.up)(y)
        return keep(self.name, x + keep(f"{self.name}.mlp", jax.vmap(self.down)(y)))


class Llama(eqx.Module):
    embed: jax.Array
    layers: list[Block]
    norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        a, b, *keys = jax.random.split(key, 2 + L)
        self.embed, self.head = 0.02 * jax.random.normal(a, (V, D)), linear(D, V, b)
        self.layers = [Block(f"layers.{i}", each) for i, each in enumerate(keys)]
        self.norm = eqx.nn.RMSNorm(D, use_bias=False)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """(T,) -> (T, V)."""
        x = keep("embed", self.embed[tokens])
        for block in self.layers:
            x = block(x)
        return keep("head", jax.vmap(self.head)(keep("norm", jax.vmap(self.norm)(x))))


def build(seed: int) -> Llama:
    return Llama(jax.random.key(seed))


def loss(model: Llama, batch: jax.Array) -> jax.Array:
    logits = jax.vmap(model)(batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


def optimizer(model: Llama) -> optax.GradientTransformation:
    return optax.adamw(1e-3, weight_decay=0.1)
