"""The Llama of llama_transformers.py in plain JAX: a port; `taps` show its inside."""

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

V, T, D, H, G, F, L = 53, 10, 24, 4, 2, 40, 2  # H heads in G groups, F the width of the mlp
if os.environ.get("LLAMA") == "full":  # the layers of Llama 3.2 1B
    V, T, D, H, G, F, L = 300, 64, 96, 8, 2, 200, 16
K = D // H  # head size
Params = dict[str, Any]

_tap: Callable[[str, jax.Array], jax.Array] = lambda name, x: x  # noqa: E731


def taps(tap: Callable[[str, jax.Array], jax.Array]) -> None:
    global _tap
    _tap = tap


def build(seed: int) -> Params:
    keys = iter(jax.random.split(jax.random.key(seed), 7 * L + 2))

    def normal(*shape: int) -> jax.Array:
        return 0.02 * jax.random.normal(next(keys), shape)

    def block() -> Params:
        return {
            "attention_norm": jnp.ones(D), "wq": normal(D, H, K), "wk": normal(D, G, K),
            "wv": normal(D, G, K), "wo": normal(H, K, D), "mlp_norm": jnp.ones(D),
            "gate": normal(D, F), "up": normal(D, F), "down": normal(F, D),
        }  # fmt: skip

    return {"embed": normal(V, D), "layers": [block() for _ in range(L)], "norm": jnp.ones(D),
            "head": normal(D, V)}  # fmt: skip


def rms_norm(scale: jax.Array, x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale


def rotate(x: jax.Array) -> jax.Array:
    """(..., T, heads, K), each half of the head size turned with the other."""
    angle = jnp.arange(x.shape[-3])[:, None] * 10000.0 ** (-2 * jnp.arange(K // 2) / K)
    cos, sin = (f(angle)[:, None, :] for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """(..., T, heads, K), H heads of queries and G of keys and values."""
    k, v = (jnp.repeat(each, H // G, axis=-2) for each in (rotate(k), v))
    scores = jnp.einsum("...thk,...shk->...hts", rotate(q), k) * K**-0.5
    scores = jnp.where(jnp.tri(q.shape[-3], dtype=bool), scores, -jnp.inf)
    return jnp.einsum("...hts,...shk->...thk", jax.nn.softmax(scores), v)


def attention(p: Params, x: jax.Array) -> jax.Array:
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, p[name]) for name in ("wq", "wk", "wv"))
    return jnp.einsum("bthk,hkd->btd", attend(q, k, v), p["wo"])


def llama(params: Params, tokens: jax.Array) -> jax.Array:
    x = _tap("embed", params["embed"][tokens])
    for i, p in enumerate(params["layers"]):
        y = _tap(f"layers.{i}.input_norm", rms_norm(p["attention_norm"], x))
        x = x + _tap(f"layers.{i}.attn", attention(p, y))
        y = _tap(f"layers.{i}.post_attention_norm", rms_norm(p["mlp_norm"], x))
        gated = jax.nn.silu(_tap(f"layers.{i}.mlp.gate", y @ p["gate"])) * (y @ p["up"])
        x = x + _tap(f"layers.{i}.mlp", gated @ p["down"])
        x = _tap(f"layers.{i}", x)
    return _tap("head", _tap("norm", rms_norm(params["norm"], x)) @ params["head"])


def loss(params: Params, batch: jax.Array) -> jax.Array:
    logits = llama(params, batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


def optimizer(params: Params) -> optax.GradientTransformation:
    return optax.adamw(1e-3, weight_decay=0.1)
