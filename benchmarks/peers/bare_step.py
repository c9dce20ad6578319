"""GPT-2 and its training step by hand, in plain JAX: no module system, no optimizer library.

The lower bound that `jax_impl` is measured against: nothing in it is there for any other end than
the step. It imports nothing of ours on purpose. Shapes: B batch, T time, D width, H heads, K head
dim, V vocabulary, R rows (B T), N micro-batches. A matrix is in x out, an embedding V x D.

The matmuls' inputs and outputs are in the compute dtype; embeddings, residual, norms, softmax, loss
and everything of the optimizer are in that of the parameters.
"""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

Params = dict[str, Array]
Attend = Callable[[Array, Array, Array, DTypeLike], Array]
NORM_EPS, ADAM_EPS, CLIP_EPS = 1e-5, 1e-8, 1e-6

# Elementwise and cheap: the backward pass takes its input again rather than keep what is inside.
cheap = partial(jax.checkpoint, prevent_cse=False)


class State(NamedTuple):
    """What a step changes; `updates` is Adam's count and the schedule's position."""

    params: Params
    mu: Params
    nu: Params
    updates: Array


class Metrics(NamedTuple):
    loss: Array
    grad_norm: Array  # before clipping


@jax.custom_vjp
def affine(x: Array, kernel: Array, bias: Array) -> Array:
    """Rows (R, in) @ kernel + bias, rounded once."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    y = jnp.matmul(x, kernel, preferred_element_type=wide)
    return (y + bias.astype(wide)).astype(x.dtype)


def _affine_forward(x: Array, kernel: Array, bias: Array) -> Any:
    return affine(x, kernel, bias), (x, kernel)


def _affine_backward(kept: Any, dy: Array) -> Any:
    x, kernel = kept
    wide = jnp.promote_types(dy.dtype, jnp.float32)
    return dy @ kernel.T, x.T @ dy, dy.astype(wide).sum(0).astype(dy.dtype)


affine.defvjp(_affine_forward, _affine_backward)


@cheap
def layer_norm(x: Array, scale: Array, bias: Array) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    variance = jnp.square(centred).mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + NORM_EPS) * scale + bias


@cheap
def gelu(x: Array) -> Array:
    """tanh form, in float32 inside, rounded once."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return jax.nn.gelu(wide, approximate=True).astype(x.dtype)


def attend(
    q_BTHK: Array, k_BTHK: Array, v_BTHK: Array, wide: DTypeLike, *, blocks: int = 1
) -> Array:
    """Causal; matmuls in the compute dtype, softmax in the wide one.

    A block of queries leaves out the keys behind it, which would all be masked.
    """
    t, d_head = q_BTHK.shape[1], q_BTHK.shape[-1]
    edges = [t * i // blocks for i in range(blocks + 1)]
    parts = []
    for start, stop in pairwise(edges):
        q, k, v = q_BTHK[:, start:stop], k_BTHK[:, :stop], v_BTHK[:, :stop]
        scores_BHTT = jnp.einsum("bthk,bshk->bhts", q, k).astype(wide) * d_head**-0.5
        causal_TT = jnp.tril(jnp.ones((stop - start, stop), bool), start)
        probs_BHTT = jax.nn.softmax(jnp.where(causal_TT, scores_BHTT, -jnp.inf), axis=-1)
        parts.append(jnp.einsum("bhts,bshk->bthk", probs_BHTT.astype(v.dtype), v))
    return jnp.concatenate(parts, axis=1)


def attend_cudnn(q_BTHK: Array, k_BTHK: Array, v_BTHK: Array, wide: DTypeLike) -> Array:
    """For half precision on a GPU."""
    return jax.nn.dot_product_attention(
        q_BTHK, k_BTHK, v_BTHK, is_causal=True, implementation="cudnn"
    )


def mean_loss(
    params: Params, batch: Array, *, layers: int, heads: int, compute: DTypeLike, attend: Attend
) -> Array:
    """(B, T+1) tokens -> mean cross-entropy in nats."""
    tokens_BT, targets_BT = batch[:, :-1], batch[:, 1:]
    b, t = tokens_BT.shape
    embed_VD = params["embed.weight"]
    wide, d = embed_VD.dtype, embed_VD.shape[1]

    def linear(name: str, x: Array) -> Array:
        cast = (a.astype(compute) for a in (x, params[f"{name}.weight"], params[f"{name}.bias"]))
        return affine(*cast)

    def norm(name: str, x: Array) -> Array:
        return layer_norm(x, params[f"{name}.weight"], params[f"{name}.bias"])

    x_RD = (embed_VD[tokens_BT] + params["position.weight"][:t]).reshape(b * t, d)
    for i in range(layers):
        block = f"blocks.{i}"
        qkv_R3D = linear(f"{block}.attn.qkv", norm(f"{block}.norm1", x_RD))
        q, k, v = (y.reshape(b, t, heads, -1) for y in jnp.split(qkv_R3D, 3, axis=-1))
        y_RD = attend(q, k, v, wide).reshape(b * t, d)
        x_RD = x_RD + linear(f"{block}.attn.proj", y_RD)
        h_RF = gelu(linear(f"{block}.mlp.up", norm(f"{block}.norm2", x_RD)))
        x_RD = x_RD + linear(f"{block}.mlp.down", h_RF)
    logits_RV = norm("norm", x_RD).astype(compute) @ embed_VD.astype(compute).T
    logits_RV, targets_R = logits_RV.astype(wide), targets_BT.reshape(-1)
    # By comparison: a gather's gradient would be a scatter into an array of the logits' size.
    chosen_RV = jnp.arange(logits_RV.shape[1]) == targets_R[:, None]
    of_targets_R = jnp.where(chosen_RV, logits_RV, 0).sum(-1)
    return (jax.nn.logsumexp(logits_RV, axis=-1) - of_targets_R).mean()


def clip_grads(grads: Params, clip: float) -> tuple[Params, Array]:
    """By torch's factor; and the norm before."""
    norm = jnp.sqrt(sum(jnp.square(g).sum() for g in grads.values()))
    factor = jnp.minimum(1.0, clip / (norm + CLIP_EPS))
    return {name: g * factor for name, g in grads.items()}, norm


def adamw(
    state: State,
    grads: Params,
    *,
    rate: Array,
    betas: tuple[float, float],
    decay: Mapping[str, float],
) -> State:
    (beta1, beta2), updates = betas, state.updates + 1
    power = updates.astype(rate.dtype)
    unbias1, unbias2 = 1 / (1 - beta1**power), 1 / (1 - beta2**power)
    params, mu, nu = {}, {}, {}
    for name, p in state.params.items():
        g = grads[name]
        m = mu[name] = beta1 * state.mu[name] + (1 - beta1) * g
        v = nu[name] = beta2 * state.nu[name] + (1 - beta2) * jnp.square(g)
        direction = m * unbias1 / (jnp.sqrt(v * unbias2) + ADAM_EPS)
        params[name] = p - rate * (direction + decay[name] * p)
    return State(params, mu, nu, updates)


def make_step(
    *,
    layers: int,
    heads: int,
    compute: DTypeLike,
    attend: Attend,
    rates: Array,
    betas: tuple[float, float],
    decay: Mapping[str, float],
    clip: float,
    compiler_options: dict[str, Any],
) -> Callable[[State, Array], tuple[State, Metrics]]:
    """The jitted step on (N, B, T+1) tokens; the state is donated.

    Args:
        rates: of each update, in the dtype that the optimizer computes in.
        decay: of each parameter.
    """
    loss = partial(mean_loss, layers=layers, heads=heads, compute=compute, attend=attend)

    @partial(jax.jit, donate_argnums=0, compiler_options=compiler_options)
    def step(state: State, window: Array) -> tuple[State, Metrics]:
        def micro_batch(total: Params, batch: Array) -> tuple[Params, Array]:
            part, grads = jax.value_and_grad(lambda p: loss(p, batch) / len(window))(state.params)
            return jax.tree.map(jnp.add, total, grads), part

        if len(window) == 1:
            mean, grads = jax.value_and_grad(loss)(state.params, window[0])
        else:
            zeros = jax.tree.map(jnp.zeros_like, state.params)
            grads, parts = jax.lax.scan(micro_batch, zeros, window)
            mean = parts.sum()
        grads, norm = clip_grads(grads, clip)
        state = adamw(state, grads, rate=rates[state.updates], betas=betas, decay=decay)
        return state, Metrics(mean, norm)

    return step
