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
import optax

from jax_impl import model, optim, step
from jax_impl.remat import recompute_cheap
from lockstep.config import OptimConfig
from lockstep.config.policy import Dtypes
from lockstep.train.schedule import learning_rates
from mutants.patch import Plant, after, assign, both, wrap


class Split(model.Linear):
    """Queries, keys and values by three matmuls in place of one."""

    def __call__(self, x: jax.Array) -> jax.Array:
        x, kernel = self.policy.cast_to_compute((x, self.kernel[...]))
        parts = jnp.split(kernel, 3, axis=-1)
        if self.bias is None:
            ys = [x @ part for part in parts]
        else:
            biases = jnp.split(self.policy.cast_to_compute(self.bias[...]), 3)
            ys = [model.affine(x, part, bias) for part, bias in zip(parts, biases)]
        return jnp.concatenate(ys, axis=-1)


def split_qkv(self: Any, *args: Any) -> None:
    self.qkv.__class__ = Split


def linear_by_einsum(self: model.Linear, x: jax.Array) -> jax.Array:
    """One einsum, widely summed, its backward left to autodiff."""
    x, kernel = self.policy.cast_to_compute((x, self.kernel[...]))
    wide = jnp.promote_types(x.dtype, jnp.float32)
    y = jnp.einsum("io,...i->...o", kernel, x, preferred_element_type=wide)
    if self.bias is not None:
        y = y + self.policy.cast_to_compute(self.bias[...]).astype(wide)
    return y.astype(x.dtype)


def linear_in_halves(self: model.Linear, x: jax.Array) -> jax.Array:
    """Two matmuls, each over half of the inputs, widely summed, rounded once."""
    x, kernel = self.policy.cast_to_compute((x, self.kernel[...]))
    wide, half = jnp.promote_types(x.dtype, jnp.float32), x.shape[-1] // 2
    matmul = partial(jnp.matmul, preferred_element_type=wide)
    y = matmul(x[..., :half], kernel[:half]) + matmul(x[..., half:], kernel[half:])
    if self.bias is not None:
        y += self.policy.cast_to_compute(self.bias[...]).astype(wide)
    return y.astype(x.dtype)


def attend_by_vmap(
    q_BTHK: jax.Array, k_BTHK: jax.Array, v_BTHK: jax.Array, policy: Any
) -> jax.Array:
    """One head of one sequence, mapped; scores are keys by queries, softmax by logsumexp."""

    def head(q_TK: jax.Array, k_TK: jax.Array, v_TK: jax.Array) -> jax.Array:
        t, d_head = q_TK.shape
        mask_ST = jnp.tril(jnp.full((t, t), -jnp.inf, policy.output_dtype), -1)
        scores_ST = policy.cast_to_output(k_TK @ q_TK.T) / d_head**0.5 + mask_ST
        probs_ST = jnp.exp(scores_ST - jax.nn.logsumexp(scores_ST, axis=0))
        return policy.cast_to_compute(probs_ST).T @ v_TK

    heads = jax.vmap(head, in_axes=1, out_axes=1)
    return jax.vmap(heads)(q_BTHK, k_BTHK, v_BTHK)


@recompute_cheap
def rotate_by_complex_numbers(x_BTHK: jax.Array, cos_TK: jax.Array, sin_TK: jax.Array) -> jax.Array:
    """Each pair of channels is one complex number, turned by one multiplication."""
    turn = jax.lax.complex(cos_TK, sin_TK)[: x_BTHK.shape[1], None]
    turned = turn * jax.lax.complex(*jnp.split(x_BTHK.astype(cos_TK.dtype), 2, axis=-1))
    return jnp.concatenate([turned.real, turned.imag], axis=-1).astype(x_BTHK.dtype)


@recompute_cheap
def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array | int) -> jax.Array:
    """By jnp.var, and divided by a root; still two passes."""
    deviation = jnp.sqrt(jnp.var(x, -1, keepdims=True) + model.NORM_EPS)
    return scale * ((x - x.mean(-1, keepdims=True)) / deviation) + bias


@recompute_cheap
def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return scale * (x / jnp.sqrt((x * x).sum(-1, keepdims=True) / x.shape[-1] + model.NORM_EPS))


def widely(function: Callable, x: jax.Array) -> jax.Array:
    """In float32 inside, rounded once."""
    return function(x.astype(jnp.promote_types(x.dtype, jnp.float32))).astype(x.dtype)


def gelu(x: jax.Array) -> jax.Array:
    """By the logistic function."""
    return x * jax.nn.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3))


def silu(x: jax.Array) -> jax.Array:
    """By softplus."""
    return x * jnp.exp(-jax.nn.softplus(-x))


def loss_by_logsumexp(logits_BTV: jax.Array, targets_BT: jax.Array, dtypes: Dtypes) -> jax.Array:
    """logsumexp minus the target's logit in place of optax's cross-entropy."""
    logits = logits_BTV.astype(dtypes.output)
    targets = jnp.take_along_axis(logits, targets_BT[..., None], axis=-1).squeeze(-1)
    return (jax.nn.logsumexp(logits, axis=-1) - targets).mean()


def norm_by_dot_products(tree: Any) -> jax.Array:
    """The global norm by every gradient's product with itself."""
    dot = partial(jnp.vdot, precision="highest")
    return jnp.sqrt(sum(dot(g, g) for g in jax.tree.leaves(tree)))


def written_out_adamw(
    config: OptimConfig, decay_mask: dict[str, bool], param_dtype: str
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
    return optax.chain(
        optim.clip_by_global_norm(config.clip), optax.GradientTransformation(init, update)
    )


REWRITES: dict[str, Plant] = {
    "qkv-split": after(model.Attention, "__init__", split_qkv),
    "linear-by-einsum": assign(model.Linear, "__call__", linear_by_einsum),
    "linear-in-halves": assign(model.Linear, "__call__", linear_in_halves),
    # the same lines, their backward left to autodiff
    "plain-affine": assign(model, "affine", model.affine.fun),
    "attention-by-vmap": assign(model, "attend", attend_by_vmap),
    "rotation-by-complex-numbers": assign(model, "rotate", rotate_by_complex_numbers),
    "norms-by-division": both(
        assign(model, "_layer_norm", layer_norm), assign(model, "_rms_norm", rms_norm)
    ),
    "activations-written-out": both(
        assign(model, "_gelu", recompute_cheap(partial(widely, gelu))),
        assign(model, "_silu", recompute_cheap(partial(widely, silu))),
    ),
    "loss-by-logsumexp": assign(step, "mean_loss", loss_by_logsumexp),
    # scanned layers where they are unrolled, and the other way round
    "layers-swapped": wrap(step, "scans_layers", lambda right, config: not right(config)),
    # no loop is left to XLA: it sees every micro-batch and every layer
    "window-unrolled": assign(jax.lax, "scan", partial(jax.lax.scan, unroll=True)),
    "norm-by-dot-products": assign(optax.tree, "norm", norm_by_dot_products),
    "adamw-written-out": assign(optim, "adamw", written_out_adamw),
    # on a CPU, Eigen's matmuls in place of YNNPACK's; the flag counts only before XLA starts
    "without-ynnpack": lambda: os.environ.update(
        XLA_FLAGS="--xla_cpu_experimental_ynn_fusion_type="
    ),
}
