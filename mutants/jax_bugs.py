"""Planted bugs: small, named, each a mistake somebody has made, for the life of one process.

`lockstep/parity/bugs.py` says what each is and which rung must catch it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import optax

from jax_impl import bridge, dropout, model, optim, precision, remat, step

# --- accumulation and the loss scale


def multisteps_in_float32() -> None:
    """The default of optax.MultiSteps, under float64 too."""
    right = optax.MultiSteps
    optim.optax.MultiSteps = lambda *args, accumulator_dtype, **rest: right(*args, **rest)


def plain_multisteps() -> None:
    """optax.MultiSteps around AdamW, with nothing said of overflows."""

    def optimizer(config: Any, mask: Any, dtype: str) -> optax.GradientTransformationExtraArgs:
        inner = optim.adamw(config, mask, dtype)
        steps = optax.MultiSteps(
            inner, config.accum, use_grad_mean=False, accumulator_dtype=jnp.dtype(dtype)
        )
        return optax.GradientTransformationExtraArgs(
            steps.init, lambda grads, state, params, do_step: steps.update(grads, state, params)
        )

    step.optimizer = optimizer


def mean_of_means() -> None:
    """The loss is divided by N, and MultiSteps takes the mean once more."""
    right = optax.MultiSteps
    optim.optax.MultiSteps = lambda inner, n, use_grad_mean, **rest: right(inner, n, **rest)


def loss_scale_floor() -> None:
    """jmp's own floor of 1, which GradScaler has not."""

    def scale(config: Any, scale: jax.Array, good_steps: jax.Array) -> jmp.LossScale:
        right = precision.loss_scale(config, scale, good_steps)
        if isinstance(right, jmp.NoOpLossScale):
            return right
        return jmp.DynamicLossScale(scale, good_steps, config.loss_scale_interval)

    step.loss_scale = scale


def overflow_not_looked_for() -> None:
    step.jmp.all_finite = lambda tree: jnp.array(True)


# --- the optimizer


def optax_clip() -> None:
    """optax's own clipping, without torch's 1e-6 in the denominator."""

    def clip_by_global_norm(clip: float) -> optax.GradientTransformation:
        def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            factor = jnp.minimum(1.0, clip / optax.tree.norm(grads))
            clipped = jax.tree.map(lambda g: g * factor.astype(g.dtype), grads)
            return clipped, right(clip).update(grads, state)[1]

        return optax.GradientTransformation(right(clip).init, update)

    right = optim.clip_by_global_norm
    optim.clip_by_global_norm = clip_by_global_norm


def eps_inside_root() -> None:
    """Adam's epsilon under the square root, as optax's eps_root does."""
    right = optax.adamw
    optim.optax.adamw = lambda *args, eps, **rest: right(*args, eps=0.0, eps_root=eps, **rest)


def nesterov() -> None:
    right = optax.adamw
    optim.optax.adamw = lambda *args, **rest: right(*args, nesterov=True, **rest)


def default_decay_mask() -> None:
    """No mask: everything decays."""
    right = optax.adamw
    optim.optax.adamw = lambda *args, mask, **rest: right(*args, **rest)


# --- the model


def island_forgotten(name: str) -> Callable[[], None]:
    """A place that asks for the policy of the model, not for that of its module."""

    def plant() -> None:
        right = model.make_policy
        model.make_policy = lambda roles, module="": right(
            roles, "" if module.endswith(name) else module
        )

    return plant


def islands_of_first_block() -> None:
    """One graph for all blocks, as where their programs are the same."""
    right = model.GPT.split_blocks

    def split_blocks(self: Any) -> Any:
        blocks: Any = right(self)
        return [(blocks[0][0], params) for _, params in blocks]

    model.GPT.split_blocks = split_blocks


def fast_variance() -> None:
    """E[x^2] - E[x]^2, the default of Flax's norms."""

    def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array | int) -> jax.Array:
        mean = x.mean(-1, keepdims=True)
        variance = jnp.square(x).mean(-1, keepdims=True) - jnp.square(mean)
        return (x - mean) * jax.lax.rsqrt(variance + model.EPS) * scale + bias

    model._layer_norm = layer_norm


def bias_rounded_twice() -> None:
    """The matmul rounds to the compute dtype, and the sum with the bias once more."""
    model.affine = lambda x, kernel, bias: x @ kernel + bias


def softmax_in_compute() -> None:
    """jax.nn.softmax works in its input's dtype."""

    def attend(q_BTHK: Any, k_BTHK: Any, v_BTHK: Any, policy: jmp.Policy) -> jax.Array:
        scores = jnp.einsum("bthk,bshk->bhts", q_BTHK, k_BTHK) * q_BTHK.shape[-1] ** -0.5
        causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        probs = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
        return jnp.einsum("bhts,bshk->bthk", probs, v_BTHK)

    model.attend = attend


def activations_in_compute() -> None:
    """jax.nn.gelu and silu round after every operation, as transformers' gelu_new does."""
    model._gelu = lambda x: jax.nn.gelu(x, approximate=True)
    model._silu = jax.nn.silu


def loss_in_compute() -> None:
    """Cross-entropy keeps its input's dtype in optax."""

    def mean_loss(logits: jax.Array, targets: jax.Array, roles: Any) -> jax.Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return losses.astype(roles.output).mean()

    step.mean_loss = mean_loss


def excess_precision() -> None:
    """Strict numerics with XLA's default: no rounding between bfloat16 operations."""
    step.compiler_options = lambda config, device: {}


def default_matmul_precision() -> None:
    """JAX's own float32 on a GPU: TF32."""
    right = precision.configure

    def configure(config: Any) -> Any:
        device = right(config)
        jax.config.update("jax_default_matmul_precision", "default")
        return device

    from jax_impl import train

    train.configure = configure


def untransposed_kernel() -> None:
    """Square kernels are copied as they are."""
    right = bridge._place

    def place(name: str, ndim: int, scan: bool) -> bridge.Place:
        found = right(name, ndim, scan)
        return found._replace(transposed=found.transposed and "attn.proj" not in name)

    bridge._place = place


def gradient_stopped_at_norm() -> None:
    """The norm's statistics are taken for constants in the backward pass."""

    def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        mean = jax.lax.stop_gradient(jnp.square(x).mean(-1, keepdims=True))
        return x * jax.lax.rsqrt(mean + model.EPS) * scale

    model._rms_norm = rms_norm


# --- remat and dropout


def dots_recomputes_affine() -> None:
    """The policy that keeps matmuls does not see into a function with its own derivative."""
    remat.save_dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable


def masks_of_64_bits() -> None:
    """`bernoulli` with a Python float draws 64-bit uniforms under x64."""
    right = jax.random.bernoulli
    dropout.jax.random.bernoulli = lambda key, p, shape: right(key, 0.9, shape)


def one_mask_for_all_layers() -> None:
    """The index of a scanned layer does not reach its mask."""
    right = dropout.Dropout.__call__

    def call(self: Any, x: jax.Array, layer: Any, site: str) -> jax.Array:
        return right(self, x, -1 if isinstance(layer, int) and layer < 0 else 0, site)

    dropout.Dropout.__call__ = call


def blocks_forget_their_place() -> None:
    """The mask of a block of queries: jnp.tril(ones) without its offset."""

    class Shifted:
        def __getattr__(self, name: str) -> Any:
            return getattr(jnp, name)

        def tril(self, ones: jax.Array, k: int) -> jax.Array:
            return jnp.tril(ones)

    model.jnp = Shifted()


BUGS: dict[str, Callable[..., None]] = {
    "multisteps-in-float32": multisteps_in_float32,
    "plain-multisteps": plain_multisteps,
    "mean-of-means": mean_of_means,
    "loss-scale-floor": loss_scale_floor,
    "overflow-ignored": overflow_not_looked_for,
    "optax-clip": optax_clip,
    "eps-inside-root": eps_inside_root,
    "nesterov": nesterov,
    "decay-everywhere": default_decay_mask,
    "fast-variance": fast_variance,
    "bias-rounded-twice": bias_rounded_twice,
    "softmax-in-compute": softmax_in_compute,
    "activations-in-compute": activations_in_compute,
    "loss-in-compute": loss_in_compute,
    "excess-precision": excess_precision,
    "tf32-by-default": default_matmul_precision,
    "attention-island-forgotten": island_forgotten("attend"),
    "tied-head-island-forgotten": island_forgotten("head"),
    "islands-of-first-block": islands_of_first_block,
    "untransposed-kernel": untransposed_kernel,
    "gradient-stopped-at-norm": gradient_stopped_at_norm,
    "dots-recomputes-affine": dots_recomputes_affine,
    "masks-of-64-bits": masks_of_64_bits,
    "one-mask-for-all-layers": one_mask_for_all_layers,
    "blocks-forget-their-place": blocks_forget_their_place,
}
