"""The Llama of llama_transformers.py in Haiku: a port; `taps` show its inside."""

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import optax
from llama_jax import D, F, G, H, K, L, V, attend

keep: Any = lambda name, x: x  # noqa: E731
normal = hk.initializers.RandomNormal(0.02)


def taps(tap: Any) -> None:
    global keep
    keep = tap


def linear(size: int, name: str) -> hk.Linear:
    return hk.Linear(size, with_bias=False, w_init=normal, name=name)


def norm(name: str) -> hk.RMSNorm:
    return hk.RMSNorm(-1, name=name)


def attention(x: jax.Array) -> jax.Array:
    b, t, _ = x.shape
    sizes = {"query": H, "key": G, "value": G}
    q, k, v = (linear(n * K, name)(x).reshape(b, t, n, K) for name, n in sizes.items())
    return linear(D, "out")(attend(q, k, v).reshape(x.shape))


def block(name: str, x: jax.Array) -> jax.Array:
    y = keep(f"{name}.input_norm", norm("input_norm")(x))
    x = x + keep(f"{name}.attn", attention(y))
    y = keep(f"{name}.mlp_norm", norm("mlp_norm")(x))
    y = jax.nn.silu(linear(F, "gate")(y)) * linear(F, "up")(y)
    return keep(name, x + keep(f"{name}.mlp", linear(D, "down")(y)))


def forward(tokens: jax.Array) -> jax.Array:
    x = keep("embed", hk.Embed(V, D, w_init=normal, name="embed")(tokens))
    for i in range(L):
        with hk.experimental.name_scope(f"layers_{i}"):
            x = block(f"layers.{i}", x)
    return keep("head", linear(V, "head")(keep("norm", norm("norm")(x))))


llama: Any = hk.without_apply_rng(hk.transform(forward))


def build(seed: int) -> Any:
    return llama.init(jax.random.key(seed), jnp.zeros((1, 1), jnp.int32))


def loss(params: Any, batch: jax.Array) -> jax.Array:
    logits = llama.apply(params, batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


def optimizer(params: Any) -> optax.GradientTransformation:
    return optax.adamw(1e-3, weight_decay=0.1)
