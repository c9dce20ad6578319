"""Mutants of the JAX twin: small, named, each a mistake somebody has made.

`lockstep.parity.catalogue` says what each is and which rung must catch it.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax

from jax_impl import functional, loss, model, optim, precision, remat, step
from jax_impl.dropout import Dropout
from jax_impl.io import bridge
from lockstep.data.batch import Batch
from mutants import jax_formats, module_formats
from mutants.patch import Plant, after, assign, both, train_all, wrap

# --- accumulation and the loss scale


def accumulate_plainly(config: Any, mask: Any, dtype: str) -> optax.GradientTransformationExtraArgs:
    """optax.MultiSteps around AdamW, with nothing said of overflows."""
    inner = optim.adamw(config, mask, dtype)
    steps = optax.MultiSteps(inner, config.accum, False, accumulator_dtype=jnp.dtype(dtype))
    return optax.GradientTransformationExtraArgs(
        steps.init, lambda grads, state, params, do_step: steps.update(grads, state, params)
    )


def with_floor(right: Callable, config: Any, scale: Any, good_steps: Any) -> jmp.LossScale:
    """jmp's own floor of 1, which GradScaler has not."""
    if not isinstance(right(config, scale, good_steps), jmp.DynamicLossScale):
        return jmp.NoOpLossScale()
    return jmp.DynamicLossScale(scale, good_steps, config.loss_scale_interval)


# --- the optimizer


def clip_as_optax(right: Callable, clip: float) -> optax.GradientTransformation:
    """Without torch's 1e-6 in the denominator."""

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        factor = jnp.minimum(1.0, clip / optax.tree.norm(grads))
        clipped = jax.tree.map(lambda g: g * factor.astype(g.dtype), grads)
        return clipped, right(clip).update(grads, state)[1]

    return optax.GradientTransformation(right(clip).init, update)


# --- the model


def forget_island(name: str) -> Plant:
    """A place that asks for the policy of the model, not for that of its module."""

    def wrong(right: Callable, function: Callable, dtypes: Any, **rest: Any) -> Callable:
        forgotten = replace(dtypes, compute=dtypes.policy.compute)
        return right(function, forgotten if dtypes.path.endswith(name) else dtypes, **rest)

    return wrap(model, "matmul", wrong)


def share_first_graph(right: Callable, self: Any) -> Any:
    """One graph for all blocks, as where their programs are the same."""
    blocks: Any = right(self)
    return [(blocks[0][0], params) for _, params in blocks]


def normalize_fast(x: Any, weight: Any, bias: Any, eps: float, own_moments: bool) -> jax.Array:
    """E[x^2] - E[x]^2, the default of Flax's norms."""
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x).mean(-1, keepdims=True) - jnp.square(mean)
    return (x - mean) * jax.lax.rsqrt(variance + eps) * weight + (0 if bias is None else bias)


def attend_in_compute(q: Any, k: Any, v: Any, wide: Any, *_: Any) -> jax.Array:
    """jax.nn.softmax works in its input's dtype."""
    scores = jnp.einsum("bthk,bshk->bhts", q, k) * q.shape[-1] ** -0.5
    t, s = scores.shape[-2:]
    causal = jnp.tril(jnp.ones((t, s), bool), s - t)  # queries of the last t places
    probs = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bshk->bthk", probs, v)


def loss_in_compute(logits: jax.Array, targets: jax.Array, dtypes: Any, *_: None) -> jax.Array:
    """Cross-entropy keeps its input's dtype in optax."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return losses.astype(dtypes.output).mean()


def drop_last_chunk(
    right: Callable, head: Any, x: jax.Array, targets: jax.Array, dtypes: Any, chunks: int, *_: None
) -> jax.Array:
    whole = len(x) // chunks * chunks
    return right(head, x[:whole], targets[:whole], dtypes, chunks)


def shift_mask(right: Callable, model: Any, batch: Batch, *rest: Any, **how: Any) -> jax.Array:
    """As where it is made for the tokens, and then taken for the targets."""
    if batch.counts is not None:
        every = jnp.where(batch.counts, batch.targets, jnp.roll(batch.tokens, -1, -1))
        batch = batch._replace(targets=every, counts=jnp.roll(batch.counts, 1, -1))
    return right(model, batch, *rest, **how)


def assign_places(**forgotten: None) -> Plant:
    """What is known of a batch's segments, less some of it."""
    return wrap(model.Places, "of", lambda right, segments: right(segments)._replace(**forgotten))


def stop_at_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """The norm's statistics are taken for constants in the backward pass."""
    mean = jax.lax.stop_gradient(jnp.square(x).mean(-1, keepdims=True))
    return x * jax.lax.rsqrt(mean + eps) * weight


def scale_adapters(scale: Callable[[float], float]) -> Plant:
    """In place of alpha / rank."""
    return after(model.Linear, "__init__", lambda self, *args, **rest: setattr(
        self, "scale", scale(self.scale)))  # fmt: skip


def copy_square_weights(right: Callable, name: str, array: Any) -> Any:
    return array if "attn.proj" in name else right(name, array)


def allow_tf32(config: Any, device: Any) -> None:
    """JAX's own float32 on a GPU."""
    jax.config.update("jax_default_matmul_precision", "default")


def round_always(right: Callable, dtypes: Any, device: Any) -> Any:
    """The same on a CPU, where a GPU's TF32 is emulated."""
    return right(replace(dtypes, tf32=True), device)


# --- dropout


def share_mask(right: Callable, self: Any, x: jax.Array, layer: Any, site: str) -> jax.Array:
    """The index of a scanned layer does not reach its mask."""
    return right(self, x, -1 if isinstance(layer, int) and layer < 0 else 0, site)


BUGS: dict[str, Plant] = {
    **jax_formats.BUGS,
    **{f"{name}-in-jax": plant for name, plant in module_formats.BUGS.items()},
    # optax's default, under float64 too
    "multisteps-in-float32": wrap(optax, "MultiSteps", lambda right, *args, accumulator_dtype,
                                  **rest: right(*args, **rest)),
    "plain-multisteps": assign(step, "optimizer", accumulate_plainly),
    # the loss is divided by N already
    "mean-of-means": wrap(optax, "MultiSteps", lambda right, inner, n, use_grad_mean, **rest: right(
        inner, n, **rest)),
    "loss-scale-floor": wrap(step, "loss_scale", with_floor),
    "overflow-ignored": assign(jmp, "all_finite", lambda tree: jnp.array(True)),
    "overflow-in-head": wrap(step, "by_tensor", lambda right, measure, grads: right(measure, {
        name: g if name.startswith("head") else jnp.ones_like(g) for name, g in grads.items()})),
    "same-rows-on-every-device": wrap(step, "place_rows", lambda right, tokens, mesh: right(
        np.repeat(tokens[..., :1, :], tokens.shape[-2], -2), mesh)),
    "rows-shifted-in-a-process": wrap(step, "place_rows", lambda right, tokens, mesh: right(
        np.roll(tokens, jax.process_index(), -2), mesh)),
    "optax-clip": wrap(optim, "clip_by_global_norm", clip_as_optax),
    # as optax's eps_root does
    "eps-inside-root": wrap(optax, "adamw", lambda right, *args, eps, **rest: right(
        *args, eps=0.0, eps_root=eps, **rest)),
    "nesterov": wrap(optax, "adamw", lambda right, *args, **rest: right(
        *args, nesterov=True, **rest)),
    "decay-everywhere": wrap(optax, "adamw", lambda right, *args, mask, **rest: right(
        *args, **rest)),
    "documents-seen-in-jax": assign_places(same_BTT=None),
    "positions-not-restarted-in-jax": assign_places(positions_BT=None),
    "fast-variance": assign(functional, "layer_norm", normalize_fast),
    # the matmul rounds to the compute dtype, and the sum with the bias once more
    "bias-rounded-twice": assign(
        functional, "affine", lambda x, w, bias, _: x @ w if bias is None else x @ w + bias
    ),
    "lora-unscaled-in-jax": scale_adapters(lambda scale: 1.0),
    "lora-scaled-twice-in-jax": scale_adapters(lambda scale: scale**2),
    "lora-b-frozen-in-jax": assign(model.Linear, "adapt", lambda self, x: self.linear(
        self.linear(x, self.lora_a), jax.lax.stop_gradient(self.lora_b[...]))),
    "lora-scale-rounded": assign(functional, "scale", lambda x, by: x * by),
    "base-trained-in-jax": train_all(bridge),
    "softmax-in-compute": assign(model, "attend", attend_in_compute),
    # they round after every operation, as transformers' gelu_new does
    "activations-in-compute": both(
        assign(functional, "gelu", lambda x, approximate: jax.nn.gelu(x)),
        assign(functional, "silu", jax.nn.silu),
    ),
    "last-chunk-dropped": wrap(step, "mean_loss_in_chunks", drop_last_chunk),
    # each micro-batch divides by its own count, and the means are averaged
    "mean-of-micro-batch-means-in-jax": wrap(
        step.Trainer, "micro_batch_loss", lambda right, self, params, over, **rest: right(
            self, params, over=None, **rest)),
    "mean-over-padding-in-jax": wrap(step, "mean_count", lambda right, window: jnp.array(
        window.targets[0].size)),
    "mask-shifted-in-jax": wrap(step, "batch_loss", shift_mask),
    # where a target does not count, token 0 does
    "ignored-token-counted-in-jax": assign(
        loss, "average", lambda losses, counts, over: losses.sum() / over),
    "loss-in-compute": assign(step, "mean_loss", loss_in_compute),
    # XLA's default: no rounding between bfloat16 operations
    "excess-precision": both(
        assign(step, "compiler_options", lambda config, device: {}),
        # Of what is asked for in float32 and rounded by us, XLA on a CPU skips no rounding.
        assign(step, "choose_products", precision.emulate),
    ),
    "tf32-by-default": both(
        after(precision, "set_switches", allow_tf32), wrap(step, "choose_products", round_always)
    ),
    "attention-island-forgotten": forget_island("attend"),
    "tied-head-island-forgotten": forget_island("head"),
    "islands-of-first-block": wrap(model.GPT, "split_blocks", share_first_graph),
    "gradients-in-compute-in-jax": wrap(
        precision, "backward_in", lambda right, kind, product: right("float32", product)
    ),
    "forward-in-gradients-dtype-in-jax": wrap(
        model, "matmul", lambda right, function, dtypes, **rows: right(
            function, replace(dtypes, compute=dtypes.grads), **rows)),
    "untransposed-kernel": wrap(bridge, "turn", copy_square_weights),
    "gradient-stopped-at-norm": assign(functional, "rms_norm", stop_at_norm),
    # the policy does not see into a function with its own derivative
    "dots-recomputes-affine": assign(
        remat, "save_dots", jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    ),
    # a Python float draws 64-bit uniforms under x64
    "masks-of-64-bits": wrap(jax.random, "bernoulli", lambda right, key, p, shape: right(
        key, 0.9, shape)),
    "one-mask-for-all-layers": wrap(Dropout, "__call__", share_mask),
    # jnp.tril(ones) without its offset
    "blocks-forget-their-place": wrap(jnp, "tril", lambda right, ones, k=0: right(ones)),
}  # fmt: skip
