"""Semantics-preserving variants: the same twin by another order of operations, kernel or layout.

They measure the ladder's false-positive rate. Each must come before the first twin is built, and
leaves the roles of `lockstep.config.policy` alone.
"""

import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import optax

from jax_impl import functional, model, optim, step
from jax_impl.extra import cpu, rules
from jax_impl.extra.packed import Segments
from lockstep.config import OptimConfig
from lockstep.data.batch import Batch
from lockstep.train.schedule import learning_rates
from mutants.patch import Plant, after, assign, both, wrap


def split_qkv(self: Any, *args: Any) -> None:
    """Queries, keys and values by three matmuls in place of one, whose gradients to x are summed
    widely and rounded once: three rounded ones are another rounding, which bfloat16 shows."""
    product = self.qkv.product

    def linear_split(x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
        wide = jnp.promote_types(x.dtype, jnp.float32)
        rows, parts = x.astype(wide), jnp.split(weight.astype(wide), 3, axis=-1)
        biases = (None,) * 3 if bias is None else jnp.split(bias, 3)
        each = [product(rows, part, own) for part, own in zip(parts, biases)]
        return jnp.concatenate(each, axis=-1).astype(x.dtype)

    self.qkv.product = linear_split


def linear_by_einsum(x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
    """One einsum, widely summed, its backward left to autodiff."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    y = jnp.einsum("io,...i->...o", weight, x, preferred_element_type=wide)
    return (y if bias is None else y + bias.astype(wide)).astype(x.dtype)


def linear_in_halves(x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Two matmuls, each over half of the inputs, widely summed, rounded once."""
    wide, half = jnp.promote_types(x.dtype, jnp.float32), x.shape[-1] // 2
    matmul = partial(jnp.matmul, preferred_element_type=wide)
    y = matmul(x[..., :half], weight[:half]) + matmul(x[..., half:], weight[half:])
    return (y if bias is None else y + bias.astype(wide)).astype(x.dtype)


def in_each_product(function: functional.Product) -> Plant:
    """Replaces each product of rows and weights that has no rounding and no own gradients."""

    def choose(right: Callable, grads: str, recipe: Any, **how: bool) -> functional.Product:
        return right(grads, recipe, **how) if grads or recipe else function

    return wrap(rules, "make_product", choose)


def plainly(product: Any) -> functional.Product:
    """Returns the same lines with their backward left to autodiff."""
    return product.fun


def attend_by_vmap(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHK: jax.Array,
    positions: model.Positions,
    *,
    policy: jmp.Policy,
    **_: Any,
) -> jax.Array:
    """One head of one sequence, mapped; scores are keys by queries, softmax by logsumexp."""
    q_BTHK, k_BTHK, v_BTHK = policy.cast_to_compute((q_BTHK, k_BTHK, v_BTHK))
    same_BTT = positions.same_BTT if isinstance(positions, Segments) else None
    wide = policy.output_dtype

    def head(q_TK: jax.Array, k_TK: jax.Array, v_TK: jax.Array, same_TT: Any) -> jax.Array:
        t, d_head = q_TK.shape
        mask_ST = jnp.tril(jnp.full((t, t), -jnp.inf, wide), -1)
        mask_ST = mask_ST if same_TT is None else jnp.where(same_TT.T, mask_ST, -jnp.inf)
        scores_ST = (k_TK @ q_TK.T).astype(wide) / d_head**0.5 + mask_ST
        probs_ST = jnp.exp(scores_ST - jax.nn.logsumexp(scores_ST, axis=0))
        return probs_ST.astype(v_TK.dtype).T @ v_TK

    heads = jax.vmap(head, in_axes=(1, 1, 1, None), out_axes=1)
    return jax.vmap(heads)(q_BTHK, k_BTHK, v_BTHK, same_BTT)


@partial(jax.checkpoint, prevent_cse=False)
def rotate_by_complex_numbers(x_BTHK: jax.Array, cos_TK: jax.Array, sin_TK: jax.Array) -> jax.Array:
    """Each pair of channels is one complex number, turned by one multiplication."""
    turn = jax.lax.complex(cos_TK, sin_TK)[..., None, :]
    turned = turn * jax.lax.complex(*jnp.split(x_BTHK.astype(cos_TK.dtype), 2, axis=-1))
    return jnp.concatenate([turned.real, turned.imag], axis=-1).astype(x_BTHK.dtype)


@partial(jax.checkpoint, prevent_cse=False, static_argnums=3)
def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array | None, eps: float) -> jax.Array:
    """By jnp.var, and divided by a root; still two passes."""
    deviation = jnp.sqrt(jnp.var(x, -1, keepdims=True) + eps)
    y = weight * ((x - x.mean(-1, keepdims=True)) / deviation)
    return y if bias is None else y + bias


@partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """By a sum, and divided by a root."""
    return x / jnp.sqrt((x * x).sum(-1, keepdims=True) / x.shape[-1] + eps) * weight


def gelu(x: jax.Array) -> jax.Array:
    """By the logistic function."""
    return x * jax.nn.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3))


def silu(x: jax.Array) -> jax.Array:
    """By softplus."""
    return x * jnp.exp(-jax.nn.softplus(-x))


def loss_by_logsumexp(
    logits_BTV: jax.Array, batch: Batch, dtype: Any, over: jax.Array | None = None
) -> jax.Array:
    """logsumexp minus the target's logit, its derivative left to JAX, and weights of 0 and 1."""
    logits = logits_BTV.astype(dtype)
    targets = jnp.take_along_axis(logits, batch.targets[..., None], axis=-1).squeeze(-1)
    losses = jax.nn.logsumexp(logits, axis=-1) - targets
    if batch.counts is None or over is None:
        return losses.mean()
    return (losses * batch.counts / over.astype(losses.dtype)).sum()


def norm_by_dot_products(tree: Any) -> jax.Array:
    """The global norm by every gradient's product with itself."""
    dot = partial(jnp.vdot, precision="highest")
    return jnp.sqrt(sum(dot(g, g) for g in jax.tree.leaves(tree)))


def written_out_adamw(
    config: OptimConfig, decay_mask: dict[str, bool], param_dtype: str, norms: optim.Norms
) -> optax.GradientTransformation:
    """In the reordered form of its paper: bias corrections folded into rate and epsilon."""
    rates = jnp.asarray(learning_rates(config), jnp.promote_types(param_dtype, jnp.float32))
    beta1, beta2 = config.beta1, config.beta2

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        t = state.count + 1
        root = jnp.sqrt(1 - beta2**t)
        rate, eps = rates[state.count], optim.ADAM_EPS * root
        mu = jax.tree.map(lambda m, g: m + (1 - beta1) * (g - m), state.mu, grads)
        nu = jax.tree.map(lambda v, g: v + (1 - beta2) * (g * g - v), state.nu, grads)

        def move(m: jax.Array, v: jax.Array, p: jax.Array, decayed: bool) -> jax.Array:
            moved = rate * root / (1 - beta1**t) * m / (jnp.sqrt(v) + eps)
            decay = rate * config.weight_decay * p if decayed else 0
            return -(moved + decay).astype(p.dtype)

        return jax.tree.map(move, mu, nu, params, decay_mask), state._replace(count=t, mu=mu, nu=nu)

    init = optax.scale_by_adam(beta1, beta2).init
    clip = optim.clip_by_global_norm(config.clip, norms)
    return optax.chain(clip, optax.GradientTransformation(init, update))


WORLD_REWRITES: dict[str, Plant] = {
    "devices-reversed": wrap(
        jax, "make_mesh", lambda right, *args, devices: right(*args, devices=devices[::-1])
    ),
}
REWRITES: dict[str, Plant] = {
    **WORLD_REWRITES,
    "qkv-split": after(model.Attention, "__init__", split_qkv),
    "linear-by-einsum": in_each_product(linear_by_einsum),
    "linear-in-halves": in_each_product(linear_in_halves),
    "plain-affine": both(
        assign(functional, "affine", plainly(functional.affine)),
        assign(cpu, "linear", plainly(cpu.linear)),
    ),
    "attention-by-vmap": assign(model, "attend", attend_by_vmap),
    "rotation-by-complex-numbers": assign(model, "rotate", rotate_by_complex_numbers),
    "norms-by-division": both(
        assign(functional, "layer_norm", layer_norm),
        assign(functional, "rms_norm", rms_norm),
    ),
    "activations-written-out": both(
        assign(functional, "gelu", lambda x, approximate: functional.in_float32(gelu, x)),
        assign(functional, "silu", partial(functional.in_float32, silu)),
    ),
    "loss-by-logsumexp": assign(step, "mean_loss", loss_by_logsumexp),
    # scanned layers where they are unrolled, and the other way round
    "layers-swapped": wrap(rules, "scans_layers", lambda right, *args: not right(*args)),
    # no loop is left to XLA: it sees every micro-batch and every layer
    "window-unrolled": assign(jax.lax, "scan", partial(jax.lax.scan, unroll=True)),
    "norm-by-dot-products": assign(optax.tree, "norm", norm_by_dot_products),
    "adamw-written-out": assign(optim, "adamw", written_out_adamw),
    # on a CPU, Eigen's matmuls in place of YNNPACK's; the flag counts only before XLA starts
    "without-ynnpack": lambda: os.environ.update(
        XLA_FLAGS="--xla_cpu_experimental_ynn_fusion_type="
    ),
}
