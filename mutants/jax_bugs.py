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
from jax_impl.extra import chunks, cpu, lora, rules
from jax_impl.extra.evaluation import OtherPolicy
from jax_impl.extra.formats import gradients
from jax_impl.extra.lora import LoRALinear
from jax_impl.extra.mesh import gather, mesh
from jax_impl.extra.packed import Segments
from jax_impl.io import bridge
from jax_impl.pure import PureGPT
from lockstep.config.policy import Dtypes, Roles
from lockstep.data.batch import Batch
from mutants import jax_formats, module_formats
from mutants.patch import (
    Plant,
    after,
    assign,
    both,
    edit,
    round_always,
    scale_adapters,
    train_all,
    wrap,
)

# --- the model


def round_forward(ending: str) -> Plant:
    """Rounds parameters to bfloat16 in the forward pass; their gradients stay as they are."""

    def wrong(right: Callable, self: Any, params: dict[str, jax.Array]) -> Any:
        def rounded(w: jax.Array) -> jax.Array:
            return w + jax.lax.stop_gradient(w.astype(jnp.bfloat16).astype(w.dtype) - w)

        named = {name: rounded(w) if name.endswith(ending) else w for name, w in params.items()}
        return right(self, named)

    return wrap(PureGPT, "__call__", wrong)


# --- evaluation and sampling


def evaluate_first_weights(right: Callable, self: Any, batches: Batch) -> jax.Array:
    """The evaluation's model is loaded once, with the weights of the first evaluation."""
    if not isinstance(self, OtherPolicy):
        return right(self, batches)
    now, kept = self.state, vars(self)
    if "first_params" not in kept:
        kept["first_params"] = jax.tree.map(jnp.copy, now.params)
    self.state = replace(now, params=kept["first_params"])
    found = right(self, batches)
    self.state = now
    return found


# --- several devices


def sum_own_rows(right: Callable, product: Callable) -> Callable:
    """Gives each device's part of a shared weight the gradient of its own rows alone."""
    whole = right(product)

    def run(x: jax.Array, weight: jax.Array, bias: Any) -> jax.Array:
        parts = jax.sharding.get_abstract_mesh().shape["fsdp"]
        divided = gather.divided(weight, parts)
        if "fsdp" not in divided or len(x) % parts:
            return whole(x, weight, bias)
        axis = divided.index("fsdp")
        place = jnp.arange(weight.shape[axis]) * parts // weight.shape[axis]
        place = jnp.expand_dims(place, [each for each in range(weight.ndim) if each != axis])
        fixed = jax.lax.stop_gradient(weight)
        return jnp.concatenate([
            whole(rows, jnp.where(place == device, weight, fixed), bias)
            for device, rows in enumerate(jnp.split(x, parts))
        ])  # fmt: skip

    return run


# --- resuming


def place_by_steps(trainer: step.Trainer, state: Any) -> None:
    """A resumed run's place in the schedule is that of its steps, not of its updates."""

    def is_place(path: Any, value: Any) -> bool:
        return path[-1].tuple_name == "ScaleByScheduleState"

    moved = optax.tree.set(trainer.state.optimizer, is_place, count=jnp.int32(state.step))
    trainer.state = replace(trainer.state, optimizer=moved)


# --- the model


def forget_island(name: str) -> Plant:
    """A place that asks for the policy of the model, not for that of its module."""

    def wrong(right: Callable, self: Dtypes, path: str) -> Roles:
        return self.policy if path.endswith(name) else right(self, path)

    return wrap(Dtypes, "at", wrong)


def add_rounded(multiply: Callable) -> Callable:
    """A product that is rounded before its bias goes in, and the sum with it once more."""
    return lambda x, w, bias: multiply(x, w) if bias is None else multiply(x, w) + bias


def loss_in_compute(logits: jax.Array, batch: Batch, dtype: Any, *_: None) -> jax.Array:
    """Cross-entropy keeps its input's dtype in optax."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
    return losses.astype(dtype).mean()


def drop_last_chunk(
    right: Callable, model: Any, x: jax.Array, batch: Batch, chunks: int, *_: None
) -> jax.Array:
    whole = len(x) // chunks * chunks
    batch = batch._replace(targets=batch.targets.reshape(-1)[:whole])
    return right(model, x[:whole], batch, chunks)


def shift_mask(right: Callable, model: Any, batch: Batch, *rest: Any, **how: Any) -> jax.Array:
    """Takes for the targets what is made for the tokens."""
    if batch.counts is not None:
        every = jnp.where(batch.counts, batch.targets, jnp.roll(batch.tokens, -1, -1))
        batch = batch._replace(targets=every, counts=jnp.roll(batch.counts, 1, -1))
    return right(model, batch, *rest, **how)


def forget_of_places(change: Callable[[Segments], Segments]) -> Plant:
    """Leaves out some of what is known of a batch's segments."""
    return wrap(Segments, "of", lambda right, segments: change(right(segments)))


BUGS: dict[str, Plant] = {
    "embedding-rounded-forward-in-jax": round_forward("embed.weight"),
    "positions-rounded-forward-in-jax": round_forward("position.weight"),
    "norm-gains-rounded-forward-in-jax": round_forward("norm1.weight"),
    "norm-biases-rounded-forward-in-jax": round_forward("norm1.bias"),
    **jax_formats.BUGS,
    **{f"{name}-in-jax": plant for name, plant in module_formats.BUGS.items()},
    # optax's default, under float64 too
    "multisteps-in-float32": edit(
        optim.optimizer, ", accumulator_dtype=jnp.dtype(param_dtype)", ""
    ),
    # nothing is said of overflows
    "plain-multisteps": edit(optim.optimizer, "do_step: do_step", "do_step: jnp.array(True)"),
    # the loss is divided by N already
    "mean-of-means": edit(optim.optimizer, "use_grad_mean=False, ", ""),
    # jmp's own, which GradScaler has not
    "loss-scale-floor": edit(precision.loss_scale, "jnp.float32(0)", "jnp.float32(1)"),
    "overflow-ignored": assign(jmp, "all_finite", lambda tree: jnp.array(True)),
    # all others are taken for finite
    "overflow-in-head": edit(
        step.Trainer.unscale, "(jmp.all_finite, grads)", "(jmp.all_finite, {name: g if name"
        ".startswith('head') else jnp.ones_like(g) for name, g in grads.items()})",
    ),
    "same-rows-on-every-device": wrap(mesh, "place_rows", lambda right, batch, mesh: right(
        batch.map_arrays(lambda x: np.repeat(x[..., :1, :], x.shape[-2], -2)), mesh)),
    "rows-shifted-in-a-process": wrap(mesh, "place_rows", lambda right, batch, mesh: right(
        batch.map_arrays(lambda x: np.roll(x, jax.process_index(), -2)), mesh)),
    "optax-clip": edit(optim.clip_by_global_norm, "(norm + 1e-6)", "norm"),
    # as optax's eps_root does
    "eps-inside-root": wrap(optax, "adamw", lambda right, *args, eps, **rest: right(
        *args, eps=0.0, eps_root=eps, **rest)),
    "nesterov": wrap(optax, "adamw", lambda right, *args, **rest: right(
        *args, nesterov=True, **rest)),
    "decay-everywhere": wrap(optax, "adamw", lambda right, *args, mask, **rest: right(
        *args, **rest)),
    "documents-seen-in-jax": forget_of_places(lambda places: replace(
        places, same_BTT=jnp.ones_like(places.same_BTT))),
    "positions-not-restarted-in-jax": forget_of_places(lambda places: replace(
        places, positions_BT=jnp.arange(places.t))),
    # Flax's default
    "fast-variance": edit(
        functional.moments, "jnp.square(x - mean).mean(-1, keepdims=True)",
        "jnp.square(x).mean(-1, keepdims=True) - jnp.square(mean)",
    ),
    "bias-rounded-twice": both(
        assign(functional, "affine", add_rounded(jnp.matmul)),
        assign(cpu, "linear", add_rounded(cpu.multiply)),
    ),
    "lora-unscaled-in-jax": scale_adapters(LoRALinear, lambda scale: 1.0),
    "lora-scaled-twice-in-jax": scale_adapters(LoRALinear, lambda scale: scale**2),
    "lora-b-frozen-in-jax": assign(LoRALinear, "adapt", lambda self, x: self.multiply(
        self.multiply(x, self.lora_a[...]), jax.lax.stop_gradient(self.lora_b[...]))),
    "lora-scale-rounded": assign(lora, "scale", lambda x, by: x * by),
    "base-trained-in-jax": train_all(bridge),
    # jax.nn.softmax works in its input's dtype
    "softmax-in-compute": edit(model.attend, ".astype(policy.output_dtype)", ""),
    # they round after every operation, as transformers' gelu_new does
    "activations-in-compute": both(
        assign(functional, "gelu", lambda x, approximate: jax.nn.gelu(x)),
        assign(functional, "silu", jax.nn.silu),
    ),
    "last-chunk-dropped": wrap(chunks, "mean_loss_in_chunks", drop_last_chunk),
    # each micro-batch divides by its own count, and the means are averaged
    "mean-of-micro-batch-means-in-jax": edit(
        step.Trainer.micro_batch_loss, "dropout, over)", "dropout, None)"
    ),
    "mean-over-padding-in-jax": wrap(step, "mean_count", lambda right, window: jnp.array(
        window.targets[0].size)),
    "mask-shifted-in-jax": wrap(step, "batch_loss", shift_mask),
    # where a target does not count, token 0 does
    "ignored-token-counted-in-jax": assign(
        loss, "average", lambda losses, counts, over: losses.sum() / over),
    "loss-in-compute": assign(step, "mean_loss", loss_in_compute),
    # XLA's default: no rounding between bfloat16 operations
    "excess-precision": both(
        assign(step, "compiler_options", lambda config, platform: {}),
        # Of what is asked for in float32 and rounded by us, XLA on a CPU skips no rounding.
        assign(rules.Rules, "uses_library", lambda self: False),
    ),
    "tf32-by-default": both(
        assign(precision, "float32_matmul", lambda config, device: "default"),  # JAX's own
        round_always(),
    ),
    "attention-island-forgotten": forget_island("attend"),
    "tied-head-island-forgotten": forget_island("head"),
    # as where layers are scanned
    "islands-of-first-block": edit(
        model.Block.__init__, "self.remat = remat", "self.remat, path = remat, 'blocks.0'"
    ),
    "gradients-in-compute-in-jax": wrap(
        gradients, "backward_in", lambda right, kind, product: right("float32", product)
    ),
    "forward-in-gradients-dtype-in-jax": wrap(rules, "make_policy", lambda right, roles: right(
        replace(roles, compute=roles.grads))),
    "untransposed-kernel": edit(bridge.turn, " and ", " and 'attn.proj' not in name and "),
    # the norm's statistics are taken for constants in the backward pass
    "gradient-stopped-at-norm": edit(
        functional.rms_norm, "jnp.square(x).mean", "jnp.square(jax.lax.stop_gradient(x)).mean"
    ),
    # the policy does not see into a function with its own derivative
    "dots-recomputes-affine": assign(
        remat, "save_dots", jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    ),
    "schedule-by-steps-after-resume-in-jax": after(bridge, "load", place_by_steps),
    "grad-norm-logged-scaled-in-jax": edit(
        step.Trainer.metrics, "jnp.nan, norm)", "jnp.nan, norm * before.loss_scale)"
    ),
    "evaluation-mean-in-compute-jax": edit(
        step.Trainer.evaluate, ".mean()",
        ".mean().astype(self.config.precision.roles.compute).astype(model.wide)",
    ),
    "stale-evaluation-weights-jax": wrap(step.Trainer, "evaluate", evaluate_first_weights),
    "sampled-under-training-policy-jax": edit(
        step.Trainer.logits, "self.evaluation_model", "Trainer.evaluation_model", "(state)",
        "(self, state)",
    ),
    "no-clip-in-half-jax": edit(
        step.Trainer.__init__, "optimizer(config.optim,", "optimizer("
        "(config.replace(clip=1e9) if config.precision.roles.mixed else config).optim,",
    ),
    "block-input-in-compute-jax": edit(
        remat.remat_layer, "policy=policy)(block, index, x)",
        "policy=policy)(block, index, x.astype('bfloat16').astype(x.dtype))",
    ),
    "fsdp-gradient-of-own-rows-jax": wrap(rules, "gathered", sum_own_rows),
    # a Python float draws 64-bit uniforms under x64
    "masks-of-64-bits": wrap(jax.random, "bernoulli", lambda right, key, p, shape: right(
        key, 0.9, shape)),
    # the index of a scanned layer does not reach its mask
    "one-mask-for-all-layers": edit(
        Dropout.key_of, "layer + 1", "int(not isinstance(layer, int) or layer >= 0)"
    ),
    # jnp.tril(ones) without its offset
    "blocks-forget-their-place": wrap(jnp, "tril", lambda right, ones, k=0: right(ones)),
}  # fmt: skip
