"""Planted bugs of the JAX twin: small, named, each a mistake somebody has made.

Those of narrow formats are in `narrow_formats` and `jax_formats`, of modules' formats in
`module_formats`. `bug.same` declares the mistake that `torch_bugs` has under the same name.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np

from lockstep.config.policy import Dtypes, Roles
from lockstep.data.batch import Batch
from lockstep.parity.bug import Bug
from mutants import jax_formats, module_formats, narrow_formats, torch_bugs
from mutants.configs import BF16, DDP, FP16, GPT2, LEAN, LEAN_BF16, LORA
from mutants.declare import Declare, replaces, wraps
from mutants.patch import (
    Later,
    Plant,
    after,
    assign,
    both,
    round_always,
    scale_adapters,
    train_all,
    wrap,
)

jax, jnp = Later("jax"), Later("jax.numpy")
jmp, optax = Later("jmp"), Later("optax")
bridge, chunks = Later("jax_impl.io.bridge"), Later("jax_impl.extra.chunks")
cpu, dropout = Later("jax_impl.extra.cpu"), Later("jax_impl.dropout")
evaluation, functional = Later("jax_impl.extra.evaluation"), Later("jax_impl.functional")
gather, gradients = Later("jax_impl.extra.mesh.gather"), Later("jax_impl.extra.formats.gradients")
loss, lora = Later("jax_impl.loss"), Later("jax_impl.extra.lora")
mesh, model = Later("jax_impl.extra.mesh.mesh"), Later("jax_impl.model")
optim, packed = Later("jax_impl.optim"), Later("jax_impl.extra.packed")
precision, pure = Later("jax_impl.precision"), Later("jax_impl.pure")
remat, rules = Later("jax_impl.remat"), Later("jax_impl.extra.rules")
step = Later("jax_impl.step")

Array = Any
Trainer = Any
BUGS: dict[str, Bug] = jax_formats.BUGS | narrow_formats.JAX | module_formats.JAX
bug = Declare("jax", BUGS)
same = partial(bug.same, torch_bugs.BUGS)


# --- MultiSteps


def with_multi_steps(*left_out: str) -> Plant:
    """Calls `optax.MultiSteps` without some arguments."""
    return wrap(
        optax,
        "MultiSteps",
        lambda right, *args, **how: right(
            *args, **{name: x for name, x in how.items() if name not in left_out}
        ),
    )


@bug(rung=4)
def multisteps_in_float32() -> Plant:
    """MultiSteps has its default accumulator, under float64."""
    return with_multi_steps("accumulator_dtype")


@bug(rung=5)
def mean_of_means() -> Plant:
    """The loss is divided by N, and MultiSteps averages again."""
    return with_multi_steps("use_grad_mean")


@bug(rung=7, **FP16)
@wraps(optax, "transforms.conditionally_mask")
def plain_multisteps(right, inner, _, **how):
    """MultiSteps is told nothing of overflows."""
    return right(inner, lambda _, do_step: jnp.array(True), **how)


# --- clipping and the loss scale


@bug(rung=4, **LEAN_BF16, clip=0.5)
@wraps(step, "Trainer.__init__")
def no_clip_in_half_jax(right: Callable, self: Trainer, config: Any, *rest: Any) -> None:
    """Under bf16 nothing is clipped."""
    clip = 1e9 if config.precision.roles.mixed else config.optim.clip
    right(self, config.replace(clip=clip), *rest)
    self.config = config


@bug(rung=4, **LEAN)
@wraps(optim, "clip_by_global_norm")
def optax_clip(right: Callable, clip: float, norms: Any) -> Any:
    """Clipping is optax's, which has no 1e-6 in its denominator."""
    usual = right(clip, norms)

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        _, state = usual.update(grads, state, params)
        factor = jnp.minimum(1.0, clip / optax.tree.norm(grads))
        return jax.tree.map(lambda g: g * factor.astype(g.dtype), grads), state

    return optax.GradientTransformation(usual.init, update)


@bug(rung=7, **FP16)
@replaces(jmp, "all_finite")
def overflow_ignored(tree):
    """Gradients that are not finite go in."""
    return jnp.array(True)


@bug(rung=7, **FP16)
@wraps(step, "Trainer.by_tensor")
def overflow_in_head(right: Callable, self: Trainer, measure: Callable, tensors: Any) -> Array:
    """The head's gradient alone is looked at, all others are taken for finite."""
    if measure is jmp.all_finite:
        tensors = {
            name: x if name.startswith("head") else jnp.ones_like(x) for name, x in tensors.items()
        }
    return right(self, measure, tensors)


@bug(rung=7, **FP16)
@wraps(jmp, "DynamicLossScale")
def loss_scale_floor(right, *args):
    """The scale has jmp's floor of 1, which GradScaler has not."""
    return right(*args[:4], jnp.float32(1))


@same(suffix="-in-jax")
@wraps(step, "Trainer.metrics")
def grad_norm_logged_scaled(right: Callable, self: Trainer, before: Any, *rest: Any) -> Any:
    metrics = right(self, before, *rest)
    return metrics._replace(grad_norm=metrics.grad_norm * before.loss_scale)


# --- AdamW


@bug(rung=4, **LEAN)
@wraps(optax, "adamw")
def eps_inside_root(right, *args, eps, **rest):
    """Adam's epsilon is under the square root, as optax's eps_root."""
    return right(*args, eps=0.0, eps_root=eps, **rest)


@bug(rung=4, **LEAN)
@wraps(optax, "adamw")
def nesterov(right, *args, **rest):
    """Adam has Nesterov's momentum."""
    return right(*args, nesterov=True, **rest)


@bug(rung=4, **LEAN)
@wraps(optax, "adamw")
def decay_everywhere(right, *args, mask, **rest):
    """There is no decay mask."""
    return right(*args, **rest)


# --- adapters


@same(**LORA)
def lora_unscaled() -> Plant:
    return scale_adapters(lora.LoRALinear, lambda scale: 1.0)


@same(**LORA)
def lora_scaled_twice() -> Plant:
    return scale_adapters(lora.LoRALinear, lambda scale: scale**2)


@same(**LORA)
@replaces(lora, "LoRALinear.adapt")
def lora_b_frozen(self, x):
    return self.multiply(
        self.multiply(x, self.lora_a[...]), jax.lax.stop_gradient(self.lora_b[...])
    )


@same(**LORA)
def base_trained() -> Plant:
    return train_all(bridge)


@bug(rung=2, **BF16 | LORA)
@replaces(lora, "scale")
def lora_scale_rounded(x, by):
    """The scale alpha / rank is rounded before it multiplies."""
    return x * by


# --- the model


@bug(rung=3, **LEAN)
@replaces(functional, "rms_norm")
def gradient_stopped_at_norm(x: Array, weight: Array, eps: float) -> Array:
    """The norms' statistics have no gradient."""
    square = jnp.square(jax.lax.stop_gradient(x))
    return x * jax.lax.rsqrt(square.mean(-1, keepdims=True) + eps) * weight


@bug(rung=2, **LEAN)
@wraps(bridge, "turn")
def untransposed_kernel(right, name, array):
    """Square kernels are copied untransposed."""
    return array if "attn.proj" in name else right(name, array)


# --- precision


def round_forward(ending: str) -> Plant:
    """Rounds parameters to bfloat16 in the forward pass; their gradients stay as they are."""

    def wrong(right: Callable, self: Any, params: dict[str, Array]) -> Any:
        def rounded(w: Array) -> Array:
            return w + jax.lax.stop_gradient(w.astype(jnp.bfloat16).astype(w.dtype) - w)

        named = {name: rounded(w) if name.endswith(ending) else w for name, w in params.items()}
        return right(self, named)

    return wrap(pure.PureGPT, "__call__", wrong)


@same()
def embedding_rounded_forward() -> Plant:
    return round_forward("embed.weight")


@same()
def positions_rounded_forward() -> Plant:
    return round_forward("position.weight")


@same()
def norm_gains_rounded_forward() -> Plant:
    return round_forward("norm1.weight")


@same()
def norm_biases_rounded_forward() -> Plant:
    return round_forward("norm1.bias")


def forget_island(name: str) -> Plant:
    """A place asks for the policy of the model, not for that of its module."""

    def wrong(right: Callable, self: Dtypes, path: str) -> Roles:
        return self.policy if path.endswith(name) else right(self, path)

    return wrap(Dtypes, "at", wrong)


@bug(rung=2, fp32_islands="blocks.*.attn", **LEAN_BF16)
def attention_island_forgotten() -> Plant:
    """Scores and values of an island are bfloat16."""
    return forget_island("attend")


@bug(rung=2, fp32_islands="head", **GPT2, **LEAN_BF16)
def tied_head_island_forgotten() -> Plant:
    """A tied head is no island."""
    return forget_island("head")


@bug(rung=2, fp32_islands="blocks.0", accum=1, **BF16)
@wraps(model, "Block.__init__")
def islands_of_first_block(right, self, config, parts, path, **how):
    """All blocks have the first one's islands, as where layers are scanned."""
    return right(self, config, parts, "blocks.0", **how)


@same()
@wraps(rules, "FeatureLayers.__init__")
def stream_in_float32(right, self, *args, **how):
    right(self, *args, **how)
    self.stream = jnp.float32


@bug(rung=2, **GPT2 | LEAN)
@replaces(functional, "moments")
def fast_variance(x: Array) -> tuple[Array, Array]:
    """The variance is E[x^2] - E[x]^2, as Flax's by default."""
    mean = x.mean(-1, keepdims=True)
    return mean, jnp.square(x).mean(-1, keepdims=True) - jnp.square(mean)


@bug(rung=2, **GPT2, **LEAN_BF16)
def bias_rounded_twice() -> Plant:
    """A matmul rounds before its bias goes in, and the sum once more."""

    def add_rounded(multiply: Callable) -> Callable:
        return lambda x, w, bias: multiply(x, w) if bias is None else multiply(x, w) + bias

    return both(
        assign(functional, "affine", add_rounded(jnp.matmul)),
        assign(cpu, "linear", add_rounded(cpu.multiply)),
    )


@bug(rung=2, **LEAN_BF16)
@wraps(model, "attend")
def softmax_in_compute(right, *qkv, policy, **how):
    """Softmax is in bfloat16: jax.nn.softmax works in its input's dtype."""
    return right(*qkv, policy=replace(policy, output_dtype=policy.compute_dtype), **how)


@bug(rung=2, **GPT2, **LEAN_BF16)
def activations_in_compute() -> Plant:
    """GELU rounds after every operation in bfloat16, as transformers' gelu_new does."""
    return both(
        assign(functional, "gelu", lambda x, approximate: jax.nn.gelu(x)),
        assign(functional, "silu", jax.nn.silu),
    )


@bug(rung=3, **LEAN_BF16)
@replaces(step, "mean_loss")
def loss_in_compute(logits: Array, batch: Batch, dtype: Any, *_: None) -> Array:
    """Cross-entropy is in bfloat16: optax keeps its input's dtype."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
    return losses.astype(dtype).mean()


@bug(rung=3, **LEAN_BF16)
def excess_precision() -> Plant:
    """XLA skips roundings in strict numerics, as by default."""
    return both(
        assign(step, "compiler_options", lambda *args, **how: {}),
        # Of what is asked for in float32 and rounded by us, XLA on a CPU skips no rounding.
        assign(rules.FeatureLayers, "uses_library", lambda self: False),
    )


@bug(rung=2, policy="fp32", **LEAN)
def tf32_by_default() -> Plant:
    """JAX's default matmul precision is on under fp32."""
    return both(
        assign(precision, "float32_matmul", lambda config, device: "default"), round_always()
    )


@same()
@wraps(gradients, "backward_in")
def gradients_in_compute(right, kind, product):
    return right("float32", product)


@same()
@wraps(rules, "make_policy")
def forward_in_gradients_dtype(right, roles):
    return right(replace(roles, compute=roles.grads))


# --- the loss


@bug(rung=3, loss_chunks="3", **LEAN)
@wraps(chunks, "mean_loss_in_chunks")
def last_chunk_dropped(
    right: Callable, model: Any, x: Array, batch: Batch, chunks: int, *_: None
) -> Array:
    """Rows that fill no chunk do not count."""
    whole = len(x) // chunks * chunks
    batch = batch._replace(targets=batch.targets.reshape(-1)[:whole])
    return right(model, x[:whole], batch, chunks)


# --- targets that do not count, and several documents a row


@same()
@wraps(step, "Trainer.micro_batch_loss")
def mean_of_micro_batch_means(right, self, *rest):
    return right(self, *rest[:-1], None)


@same()
@wraps(step, "mean_count")
def mean_over_padding(right, window):
    return jnp.array(window.targets[0].size)


@same()
@wraps(step, "batch_loss")
def mask_shifted(right: Callable, model: Any, batch: Batch, *rest: Any, **how: Any) -> Array:
    if batch.counts is not None:
        every = jnp.where(batch.counts, batch.targets, jnp.roll(batch.tokens, -1, -1))
        batch = batch._replace(targets=every, counts=jnp.roll(batch.counts, 1, -1))
    return right(model, batch, *rest, **how)


@same()
@replaces(loss, "average")
def ignored_token_counted(losses, counts, target_count):
    return losses.sum() / target_count


def forget_of_places(change: Callable[[Any], Any]) -> Plant:
    """Leaves out some of what is known of a batch's segments."""
    return wrap(packed.Segments, "of", lambda right, segments: change(right(segments)))


@same()
def documents_seen() -> Plant:
    return forget_of_places(
        lambda positions: replace(positions, same_BTT=jnp.ones_like(positions.same_BTT))
    )


@same()
def positions_not_restarted() -> Plant:
    return forget_of_places(
        lambda positions: replace(positions, positions_BT=jnp.arange(positions.t))
    )


@bug(rung=9, **BF16)
@wraps(jnp, "tril")
def blocks_forget_their_place(right, ones, k=0):
    """Each causal block is masked as if it stood first: jnp.tril(ones) without its offset."""
    return right(ones)


# --- evaluation and sampling


@same(suffix="-jax")
@wraps(step, "Trainer.evaluate")
def evaluation_mean_in_compute(right: Callable, self: Trainer, batches: Batch) -> Array:
    mean = right(self, batches)
    return mean.astype(self.config.precision.roles.compute).astype(mean.dtype)


@same(suffix="-jax")
@wraps(step, "Trainer.evaluate")
def stale_evaluation_weights(right: Callable, self: Any, batches: Batch) -> Array:
    if not self.config.precision.eval_policy:
        return right(self, batches)
    now, kept = self.state, vars(self)
    if "first_params" not in kept:
        kept["first_params"] = jax.tree.map(jnp.copy, now.params)
    self.state = replace(now, params=kept["first_params"])
    found = right(self, batches)
    self.state = now
    return found


@same(suffix="-jax")
@wraps(step, "Trainer.logits")
def sampled_under_training_policy(right: Callable, self: Trainer, batch: Batch) -> Array:
    with mock.patch.object(self, "evaluation_model", self.training_model):
        return right(self, batch)


# --- dropout and remat


@bug(rung=8)
@wraps(jax, "random.bernoulli")
def masks_of_64_bits(right, key, p, shape):
    """Masks are from 64-bit uniforms under x64, as a Python float draws them."""
    return right(key, 0.9, shape)


@same(suffix="-jax")
@wraps(dropout, "Dropout.__init__")
def mask_without_micro_step(right, self, rate, **key):
    return right(self, rate, **key | {"micro_step": 0})


@bug(rung=8)
@wraps(dropout, "Dropout.key_of")
def one_mask_for_all_layers(right, self, layer, site):
    """A scanned layer's index does not reach its mask."""
    return right(self, -1 if isinstance(layer, int) and layer < 0 else 0, site)


@bug(rung=6, **LEAN_BF16 | {"remat": "block"})
@wraps(remat, "remat_layer")
def block_input_in_compute_jax(right: Callable, layer: Callable, mode: str) -> Callable:
    """A block keeps its input in bfloat16."""
    run = right(layer, mode)
    if run is layer:
        return run
    return lambda block, i, x: run(block, i, x.astype(jnp.bfloat16).astype(x.dtype))


@bug(rung=6, remat="dots", **GPT2 | LEAN)
def dots_recomputes_affine() -> Plant:
    """Remat dots recomputes matmuls with a bias: no policy sees into a custom derivative."""
    return assign(remat, "save_dots", jax.checkpoint_policies.dots_with_no_batch_dims_saveable)


# --- several devices: one program stands for all of them


def change_rows(change: Callable[[np.ndarray], np.ndarray]) -> Plant:
    return wrap(
        mesh, "place_rows", lambda right, batch, devices: right(batch.map_arrays(change), devices)
    )


@bug(rung=11, **LEAN | DDP)
def same_rows_on_every_device() -> Plant:
    """All devices train on one's rows."""
    return change_rows(lambda x: np.repeat(x[..., :1, :], x.shape[-2], -2))


@bug(rung=11, **LEAN | DDP | {"mesh": "data=2,fsdp=2"})
def rows_shifted_in_a_process() -> Plant:
    """One process's rows begin one too early."""
    return change_rows(lambda x: np.roll(x, jax.process_index(), -2))


@bug(rung=11, **LEAN | {"mesh": "fsdp=4"})
@wraps(rules, "gathered")
def fsdp_gradient_of_own_rows_jax(right: Callable, product: Callable) -> Callable:
    """Where weights are shared, each device's gradient is that of its own rows."""
    whole = right(product)

    def run(x: Array, weight: Array, bias: Any) -> Array:
        parts = jax.sharding.get_abstract_mesh().shape["fsdp"]
        divided = gather.divided(weight, parts)
        if "fsdp" not in divided or len(x) % parts:
            return whole(x, weight, bias)
        axis = divided.index("fsdp")
        place = jnp.arange(weight.shape[axis]) * parts // weight.shape[axis]
        place = jnp.expand_dims(place, [each for each in range(weight.ndim) if each != axis])
        fixed = jax.lax.stop_gradient(weight)
        return jnp.concatenate(
            [
                whole(rows, jnp.where(place == device, weight, fixed), bias)
                for device, rows in enumerate(jnp.split(x, parts))
            ]
        )

    return run


# --- resuming


@bug(rung=10, **FP16)
def schedule_by_steps_after_resume_in_jax() -> Plant:
    """A resumed run's rate is that of its steps, not of its updates, and logged as right."""

    def is_place(path: Any, value: Any) -> bool:
        return path[-1].tuple_name == "ScaleByScheduleState"

    def move(trainer: Trainer, state: Any) -> None:
        moved = optax.tree.set(trainer.state.optimizer, is_place, count=jnp.int32(state.step))
        trainer.state = replace(trainer.state, optimizer=moved)

    return after(bridge, "load", move)
