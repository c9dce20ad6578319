"""The GPT of gpt_torch.py in plain JAX, without modules: a port; `taps` show its inside."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

V, T, D, H, L = 61, 12, 24, 3, 2  # vocabulary, context, width, heads, layers
Params = dict[str, Any]

_tap: Callable[[str, jax.Array], jax.Array] = lambda name, x: x  # noqa: E731


def taps(tap: Callable[[str, jax.Array], jax.Array]) -> None:
    """`lockstep check` looks, and puts the reference's values in, where `_tap` is called."""
    global _tap
    _tap = tap


def build(seed: int) -> Params:
    keys = iter(jax.random.split(jax.random.key(seed), 6 * L + 2))

    def normal(*shape: int, std: float = 0.02) -> jax.Array:
        return std * jax.random.normal(next(keys), shape)

    def norm() -> Params:
        return {"scale": jnp.ones(D), "bias": jnp.zeros(D)}

    def linear(i: int, o: int, std: float = 0.02) -> Params:
        return {"w": normal(i, o, std=std), "b": jnp.zeros(o)}

    def block() -> Params:
        small = 0.02 / (2 * L) ** 0.5
        return {"ln1": norm(), "qkv": linear(D, 3 * D), "proj": linear(D, D, small),
                "ln2": norm(), "up": linear(D, 4 * D), "down": linear(4 * D, D, small)}  # fmt: skip

    return {"wte": normal(V, D), "wpe": normal(T, D), "blocks": [block() for _ in range(L)],
            "ln_f": norm()}  # fmt: skip


def layer_norm(p: Params, x: jax.Array) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]


def linear(p: Params, x: jax.Array) -> jax.Array:
    return x @ p["w"] + p["b"]


def attention(p: Params, x: jax.Array, name: str) -> jax.Array:
    b, t, _ = x.shape
    qkv = _tap(f"{name}.attn.qkv", linear(p["qkv"], x))
    q, k, v = (part.reshape(b, t, H, D // H) for part in jnp.split(qkv, 3, axis=-1))
    scores = jnp.einsum("bthk,bshk->bhts", q, k) / (D // H) ** 0.5
    scores = jnp.where(jnp.tri(t, dtype=bool), scores, -jnp.inf)
    y = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores), v).reshape(b, t, D)
    return _tap(f"{name}.attn.proj", linear(p["proj"], y))


def gpt(params: Params, tokens: jax.Array) -> jax.Array:
    x = params["wte"][tokens] + params["wpe"][: tokens.shape[1]]
    for i, p in enumerate(params["blocks"]):
        name = f"blocks.{i}"
        x = x + attention(p, _tap(f"{name}.ln_1", layer_norm(p["ln1"], x)), name)
        y = _tap(f"{name}.ln_2", layer_norm(p["ln2"], x))
        up = _tap(f"{name}.mlp.up", linear(p["up"], y))
        x = x + _tap(f"{name}.mlp.down", linear(p["down"], jax.nn.gelu(up, approximate=True)))
        x = _tap(name, x)
    return _tap("logits", _tap("ln_f", layer_norm(params["ln_f"], x)) @ params["wte"].T)


def loss(params: Params, batch: jax.Array) -> jax.Array:
    logits = jax.nn.log_softmax(gpt(params, batch[:, :-1]))
    return -jnp.take_along_axis(logits, batch[:, 1:, None], -1).mean()
