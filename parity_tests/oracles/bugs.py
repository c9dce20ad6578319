"""Planted bugs of training semantics, each with the oracle that must fail under it.

Most are in code that both twins share, or are the same in both, so that no comparison of the twins
shows them. Bugs of one twin are in `lockstep.parity.catalogue`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn.functional as F

import jax_impl.dropout
import jax_impl.extra.attention
import jax_impl.extra.evaluation
import jax_impl.extra.formats.rounding
import jax_impl.extra.scan
import jax_impl.io.bridge
import jax_impl.model
import jax_impl.optim
import jax_impl.step
import jax_impl.twin
import torch_ref.dropout
import torch_ref.extra.attention
import torch_ref.extra.chunks
import torch_ref.extra.evaluation
import torch_ref.extra.formats.delayed
import torch_ref.extra.formats.rounding
import torch_ref.extra.mesh.mesh
import torch_ref.io.bridge
import torch_ref.loss
import torch_ref.model
import torch_ref.optim
import torch_ref.step
from lockstep.config import Config
from lockstep.config import config as config_module
from lockstep.config.tensors import ADAPTERS
from lockstep.data.batch import Batch
from lockstep.formats.rounding import NeutralRounding
from lockstep.judge import compare
from lockstep.model import params
from lockstep.model.segments import segments
from lockstep.model.stacked import is_stacked
from lockstep.parity import case
from lockstep.train import loss_scale
from mutants.declare import Make
from mutants.patch import Plant, after, assign, both, wrap


@dataclass(frozen=True)
class Bug:
    """A mistake, and the test that must fail under it.

    Args:
        file: the test file of this folder, without test_.
        test: the test, without test_.
        arguments: the test's.
    """

    name: str
    file: str
    test: str
    plant: Plant
    arguments: tuple[Any, ...]


BUGS: list[Bug] = []


def bug(file: str, test: str, *arguments: Any) -> Callable[[Make], Make]:
    """Declares a bug under its function's name, with the test that must fail."""

    def register(make: Make) -> Make:
        name = make.__name__.replace("_", "-")
        BUGS.append(Bug(name, file, test, make(), arguments))
        return make

    return register


JAX, TORCH = jax_impl.step.Trainer, torch_ref.step.Trainer
DROPOUTS = jax_impl.dropout.Dropout, torch_ref.dropout.Dropout
ROUNDINGS = jax_impl.extra.formats.rounding.Rounding, torch_ref.extra.formats.rounding.Rounding
JAX_EVALUATION = jax_impl.extra.evaluation
TORCH_EVALUATION = torch_ref.extra.evaluation


def in_both(owners: tuple[Any, ...], name: str, wrong: Callable) -> Plant:
    return both(*(wrap(owner, name, wrong) for owner in owners))


# --- initial values, decay, and what is trained


def change_initial(change: Callable[[str, np.ndarray], np.ndarray]) -> Plant:
    """Changes each tensor that is drawn."""
    return wrap(params, "_initial", lambda right, name, *rest: change(name, right(name, *rest)))


def change_ends(name: str, x: np.ndarray) -> np.ndarray:
    residual = name.endswith(("attn.proj.weight", "mlp.down.weight"))
    return x * np.float32(math.sqrt(2)) if residual else x


def decays_if(rule: Callable[[bool, str], bool]) -> Plant:
    """In both twins, by whether a tensor should and by its name."""
    owners = jax_impl.step, torch_ref.optim
    return in_both(
        owners, "decays", lambda right, name, *patterns: rule(right(name, *patterns), name)
    )


def reverse_layers(right: Callable, self: Any, measure: Callable, tensors: Any) -> jax.Array:
    return right(self, measure, {n: x[::-1] if is_stacked(n) else x for n, x in tensors.items()})


@bug("initial", "initial_values", "tiny")
def residual_init_without_2() -> Plant:
    return change_initial(change_ends)


@bug("initial", "initial_values_match_transformers")
def positions_half_as_wide() -> Plant:
    return change_initial(lambda name, x: x / 2 if name.startswith("position") else x)


@bug("initial", "initial_values", "tiny")
def weights_begin_rounded() -> Plant:
    return change_initial(lambda name, x: x.astype("bfloat16").astype(np.float32))


@bug("initial", "adapters_match_peft")
def adapters_a_third_as_wide() -> Plant:
    return change_initial(
        lambda name, x: x / np.float32(math.sqrt(3)) if name.endswith(".lora_a") else x
    )


@bug("initial", "adapters_match_peft")
def adapters_add_at_the_start() -> Plant:
    return change_initial(lambda name, x: x + np.float32(0.01) if name.endswith(".lora_b") else x)


@bug("initial", "seeds_draw_other_weights")
def seed_reaches_no_weight() -> Plant:
    return wrap(
        params, "_initial", lambda right, name, shape, model, seed: right(name, shape, model, 0)
    )


@bug("initial", "seeds_draw_other_weights")
def layers_begin_alike() -> Plant:
    return wrap(
        params,
        "_initial",
        lambda right, name, *rest: right(name.lstrip("blocks.0123456789"), *rest),
    )


@bug("initial", "decay", "torch", "lora", "", "unroll")
def adapters_do_not_decay() -> Plant:
    return decays_if(lambda decays, name: decays and not name.endswith(ADAPTERS))


@bug("initial", "decay", "jax", "lora", "", "unroll")
def only_a_decays() -> Plant:
    return decays_if(lambda decays, name: decays and not name.endswith(".lora_b"))


@bug("initial", "decay", "torch", "tiny", "", "unroll")
def embeddings_decay() -> Plant:
    return decays_if(lambda decays, name: decays or name == "embed.weight")


@bug("initial", "decay", "torch", "tiny", "", "unroll")
def gains_decay() -> Plant:
    return decays_if(lambda decays, name: decays or name == "norm.weight")


@bug("initial", "decay", "torch", "tiny", "blocks.*.mlp,head", "unroll")
def patterns_of_decay_forgotten() -> Plant:
    return in_both(
        (jax_impl.step, torch_ref.optim), "decays", lambda right, name, patterns: right(name)
    )


@bug("initial", "decay", "jax", "tiny", "blocks.*.mlp,head", "scan")
def stacked_names_decay() -> Plant:
    return wrap(
        jax_impl.step,
        "decays",
        lambda right, name, patterns: right(
            name.replace("blocks.0.", "blocks.") if name.startswith("blocks") else name,
            patterns,
        ),
    )


@bug("initial", "frozen_parameters_stay", "scan", "jax")
def stacked_names_are_frozen() -> Plant:
    return wrap(
        config_module,
        "trains",
        lambda right, name, *rest: right(name.replace(".0", "").replace(".1", ""), *rest),
    )


@bug("initial", "frozen_parameters_stay", "scan", "jax")
def norms_of_stacked_layers_turned() -> Plant:
    return wrap(JAX, "by_tensor", reverse_layers)


# --- the schedule, clipping, AdamW, the loss scale and what a resumed run loads


def with_rates(change: Callable[[np.ndarray], np.ndarray]) -> Plant:
    owners = jax_impl.optim, jax_impl.step, torch_ref.step
    return in_both(owners, "learning_rates", lambda right, optim: change(right(optim)))


def clip_by_rounded_factor(right: Callable, clip: float, norms: Any) -> Any:
    usual = right(clip, norms)

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        _, state = usual.update(grads, state, params)
        factor = jnp.minimum(1.0, clip / (optax.tree.norm(grads) + 1e-6)).astype(jnp.bfloat16)
        return jax.tree.map(lambda g: g * factor.astype(g.dtype), grads), state

    return optax.GradientTransformation(usual.init, update)


def with_state(bridge: Any, change: Callable[[Any], Any]) -> Plant:
    """Loads another state than the one that was saved."""
    return wrap(
        bridge, "load", lambda right, trainer, state, *rest: right(trainer, change(state), *rest)
    )


@bug("schedule", "steps_match_manual_adamw", "torch")
def rate_doubles_late() -> Plant:
    return with_rates(lambda rates: np.where(np.arange(len(rates)) < 31, rates, rates * (1 + 1e-6)))


@bug("schedule", "steps_match_manual_adamw", "torch")
def last_rate_is_the_least() -> Plant:
    return with_rates(lambda rates: np.append(rates[:-1], rates.max() / 10))


@bug("schedule", "steps_match_manual_adamw", "torch")
def epsilon_a_hundred_times() -> Plant:
    return assign(torch_ref.optim, "ADAM_EPS", 1e-6)


@bug("schedule", "steps_match_manual_adamw", "torch")
def decay_of_gradients() -> Plant:
    return assign(torch_ref.optim, "AdamW", torch.optim.Adam)


@bug("schedule", "steps_match_manual_adamw", "torch")
def beta2_by_default() -> Plant:
    return wrap(
        torch_ref.step,
        "adamw",
        lambda right, model, optim: right(model, replace(optim, beta2=0.95)),
    )


@bug("schedule", "steps_match_manual_adamw", "jax")
def beta1_by_default_jax() -> Plant:
    return wrap(
        jax_impl.optim,
        "adamw",
        lambda right, optim, *rest: right(replace(optim, beta1=0.9), *rest),
    )


@bug("schedule", "clipping_under_half_precision", "jax", "bf16")
def clip_by_a_rounded_factor_jax() -> Plant:
    return wrap(jax_impl.optim, "clip_by_global_norm", clip_by_rounded_factor)


@bug("schedule", "clipping_under_half_precision", "torch", "fp16")
def clip_by_a_rounded_norm() -> Plant:
    return wrap(
        torch_ref.optim,
        "clip_grads_with_norm_",
        lambda right, parameters, clip, norm: right(parameters, clip, norm.bfloat16()),
    )


@bug("schedule", "resumed_after_skips", "torch")
def scale_backs_off_by_half() -> Plant:
    return after(TORCH, "__init__", lambda self, *rest: self.scaler.set_backoff_factor(0.5))


@bug("schedule", "resumed_after_skips", "jax")
def adam_counts_steps_after_resume() -> Plant:
    return with_state(jax_impl.io.bridge, lambda state: replace(state, updates=state.step))


@bug("schedule", "resumed_after_skips", "torch")
def good_steps_lost_on_resume() -> Plant:
    return with_state(torch_ref.io.bridge, lambda state: replace(state, good_steps=0))


@bug("schedule", "loss_scale_after_a_change_of_policy")
def scale_of_any_step_before() -> Plant:
    return wrap(
        loss_scale,
        "carry",
        lambda right, state, config, rows: right(
            state, config, [row | {"step": state.step} for row in rows]
        ),
    )


@bug("schedule", "loss_scale_after_a_change_of_policy")
def scale_that_fell_begins_anew() -> Plant:
    return wrap(loss_scale, "carry", lambda right, state, config, rows: right(state, config, []))


# --- evaluation


def tile_heads(right: Callable, function: Any, q: Any, k: Any, v: Any, **how: Any) -> Any:
    repeats = q.shape[2] // k.shape[2]
    return right(function, q, k.repeat(1, 1, repeats, 1), v.repeat(1, 1, repeats, 1), **how)


HEADS_TAKE_TURNS = in_both(
    (jax_impl.model, jax_impl.extra.attention),
    "repeat_heads",
    lambda right, x, heads: jnp.tile(x, (1, 1, heads // x.shape[2], 1)),
)


def evaluate_in_float32(make: Any, dtypes: Any, trainer: Any) -> Any:
    """Loads weights of the training's dtype in place of the evaluation's."""
    model = make().float()
    model.load_state_dict(trainer.model.state_dict())
    return model, dtypes.policy


def evaluate_by_training(right: Callable, self: Any, batches: Batch) -> jax.Array:
    with mock.patch.object(self, "evaluation_model", self.training_model):
        return right(self, batches)


BY_TRAINING = wrap(JAX, "evaluate", evaluate_by_training)


def loss_by_training(right: Callable, self: Any, batches: Batch) -> torch.Tensor:
    loss = self.batch_loss

    def under_its_policy(model: Any, batch: Batch, _: Any, *rest: Any) -> torch.Tensor:
        return loss(model, batch, self.roles, *rest)

    with mock.patch.object(self, "batch_loss", under_its_policy):
        return right(self, batches)


LOSS_BY_TRAINING = wrap(TORCH, "evaluate", loss_by_training)


@bug("evaluation", "loss_matches_numpy", "torch", "bf16", "")
def evaluation_of_the_first_batch() -> Plant:
    return wrap(
        TORCH, "evaluate", lambda right, self, batches: right(self, batches.select(slice(1)))
    )


@bug("evaluation", "loss_matches_numpy", "torch", "bf16", "")
def token_0_is_ignored() -> Plant:
    return wrap(
        F, "cross_entropy", lambda right, *given, **how: right(*given, ignore_index=0, **how)
    )


@bug("evaluation", "loss_matches_numpy", "torch", "fp64", "masked")
def masked_loss_over_all() -> Plant:
    return assign(
        torch_ref.loss,
        "average",
        lambda losses, counts, over: torch.where(counts, losses, 0).mean(),
    )


@bug("evaluation", "grouped_queries_match_transformers", "torch")
def grouped_queries_take_turns() -> Plant:
    return wrap(torch_ref.extra.attention, "sdpa", tile_heads)


@bug("evaluation", "grouped_queries_match_transformers", "jax")
def grouped_queries_take_turns_in_blocks() -> Plant:
    return HEADS_TAKE_TURNS


@bug("evaluation", "scores_in_the_evaluation_policy", "jax", "bf16-weights")
def evaluated_with_weights_of_training_jax() -> Plant:
    return assign(JAX_EVALUATION, "evaluation_model", lambda model, _, state: model(state.params))


@bug("evaluation", "scores_in_the_evaluation_policy", "torch", "bf16-weights")
def evaluated_with_weights_of_training() -> Plant:
    return assign(TORCH_EVALUATION, "evaluation_model", evaluate_in_float32)


@bug("evaluation", "scores_in_the_evaluation_policy", "jax", "fp64")
def float64_s_scores_in_float32() -> Plant:
    return wrap(
        jax_impl.twin.JaxTwin,
        "logits",
        lambda right, self, tokens: right(self, tokens).astype(
            np.float32 if self.config.precision.eval_policy else np.float64
        ),
    )


@bug("evaluation", "scores_in_the_evaluation_policy", "torch", "fp32")
def evaluated_under_training_s_autocast() -> Plant:
    return wrap(
        TORCH_EVALUATION,
        "evaluation_model",
        lambda right, make, dtypes, trainer: (right(make, dtypes, trainer)[0], trainer.roles),
    )


@bug("evaluation", "loss_in_the_evaluation_policy", "torch", "3")
def chunks_are_evaluated_as_in_training() -> Plant:
    return LOSS_BY_TRAINING


@bug("evaluation", "loss_in_the_evaluation_policy", "torch", "1")
def loss_evaluated_as_in_training() -> Plant:
    return LOSS_BY_TRAINING


@bug("evaluation", "loss_in_the_evaluation_policy", "jax", "3")
def chunks_are_evaluated_by_training_s_model() -> Plant:
    return BY_TRAINING


@bug("evaluation", "loss_in_the_evaluation_policy", "jax", "1")
def evaluated_by_training_s_model() -> Plant:
    return BY_TRAINING


@bug("evaluation", "scores_in_the_evaluation_policy", "jax", "bf16-weights")
def evaluation_policy_forgotten() -> Plant:
    return assign(Config, "eval_dtypes", property(lambda self: self.dtypes))


# --- delayed scaling

DELAYED = torch_ref.extra.formats.delayed.Delayed


def record_over(history: Callable[[Any, Any], Any]) -> Plant:
    """Records a step's amaxes in front of another history."""
    return wrap(
        NeutralRounding,
        "record",
        lambda right, self, kept, *found: right(self, history(self, kept), *found),
    )


def forget_processes(name: str) -> Plant:
    """A stage works as if there were one process."""

    def wrong(right: Callable, self: Any, *given: Any, **how: Any) -> None:
        with mock.patch.object(self, "processes", 1):
            right(self, *given, **how)

    return wrap(DELAYED, name, wrong)


def record_alone(self: Any, found: Any, scale: float, *, skipped: bool) -> None:
    if not skipped:
        for name, amaxes in found.items():
            self.amaxes[name] = self.rounding.record(self.amaxes[name], amaxes, scale)
    self.give_scales(self.model, self.amaxes)


@bug("formats", "history_of_amaxes", "jax")
def amaxes_of_the_scaled_loss() -> Plant:
    return in_both(
        ROUNDINGS, "units", lambda right, self, history, scale: right(self, history, 1.0)
    )


@bug("formats", "history_of_amaxes", "torch")
def history_of_one_step() -> Plant:
    return record_over(lambda self, history: 0 * history)


@bug("formats", "history_of_amaxes", "jax")
def history_never_forgets() -> Plant:
    return record_over(lambda self, history: 0 * history + self.amax(history, 1)[:, None])


@bug("formats", "scale_of_all_rows")
def tensor_scaled_by_own_rows() -> Plant:
    return assign(ROUNDINGS[1], "over_processes", lambda self, x: x)


@bug("formats", "histories_of_processes")
def amaxes_of_own_loss() -> Plant:
    return assign(DELAYED, "update_amaxes", record_alone)


@bug("formats", "histories_of_processes")
def scales_of_own_loss() -> Plant:
    return forget_processes("give_scales")


@bug("formats", "histories_of_processes")
def amaxes_of_skipped_steps() -> Plant:
    return wrap(
        DELAYED,
        "update_amaxes",
        lambda right, self, found, scale, skipped: right(self, found, scale, skipped=False),
    )


# --- several devices

MESH_MODULE = torch_ref.extra.mesh.mesh
OnMesh, Dropout = MESH_MODULE.OnMesh, torch_ref.dropout.Dropout


def drop_as(rank: Callable[[Any], int]) -> Plant:
    """A device draws the masks of another rank."""

    def wrong(right: Callable, self: Any, micro_step: int) -> Any:
        with mock.patch.object(self, "rank", rank(self)):
            return right(self, micro_step)

    return wrap(TORCH, "dropout", wrong)


def draw_from(rank: Callable[[int], int]) -> Plant:
    """A device draws the part of the mask that another rank's rows have."""

    def wrong(right: Callable, self: Any, key: Any, x: torch.Tensor) -> torch.Tensor:
        with mock.patch.object(self, "rank", rank(self.rank)):
            return right(self, key, x)

    return wrap(Dropout, "draw", wrong)


def count_own(self: Any, window: Batch) -> torch.Tensor:
    loss = MESH_MODULE.loss
    return MESH_MODULE.mean(loss.share_count(loss.count_targets(window), window), self.mesh)


@bug("mesh", "masks_of_devices_are_independent", "fast")
def parts_of_a_model_draw_alike() -> Plant:
    return drop_as(lambda self: self.mesh["data"].get_local_rank())


@bug("mesh", "masks_of_devices_are_independent", "fast")
def copies_of_a_model_draw_alike() -> Plant:
    return drop_as(lambda self: self.mesh["fsdp"].get_local_rank())


@bug("mesh", "masks_of_devices_are_independent", "fast")
def devices_draw_alike() -> Plant:
    return drop_as(lambda self: 0)


@bug("mesh", "masks_of_devices_are_independent", "strict")
def devices_draw_the_first_rows() -> Plant:
    return draw_from(lambda rank: 0)


@bug("mesh", "strict_masks_match_one_device")
def devices_draw_other_rows() -> Plant:
    return draw_from(lambda rank: rank + 1)


@bug("mesh", "mean_count_over_devices")
def devices_count_alone() -> Plant:
    return wrap(MESH_MODULE, "mean", lambda right, x, mesh: (right(x.clone(), mesh), x)[1])


@bug("mesh", "mean_count_over_devices")
def a_device_without_targets_counts_one() -> Plant:
    return assign(OnMesh, "mean_count", count_own)


# --- dropout, wrong in both twins alike


def keep_embedding(right: Callable, self: Any, x: Any, layer: Any, site: str) -> Any:
    return x if site == "embedding" else right(self, x, layer, site)


def drop_without_scale(right: Callable, self: Any, x: Any, *place: Any) -> Any:
    return right(self, x, *place) * (1 - self.rate)


@bug("dropout", "dropout_matches_transformers", "torch")
def embedding_is_not_dropped() -> Plant:
    return in_both(DROPOUTS, "__call__", keep_embedding)


@bug("dropout", "dropout_matches_transformers", "jax")
def kept_are_not_scaled() -> Plant:
    return in_both(DROPOUTS, "__call__", drop_without_scale)


@bug("dropout", "dropout_matches_transformers", "torch")
def mlp_drops_as_attention() -> Plant:
    return in_both(
        DROPOUTS,
        "key_of",
        lambda right, self, layer, site: right(self, layer, site.replace("mlp", "attention")),
    )


@bug("dropout", "dropout_matches_transformers", "jax")
def layers_drop_alike() -> Plant:
    return in_both(DROPOUTS, "key_of", lambda right, self, layer, site: right(self, 0, site))


@bug("dropout", "dropout_matches_transformers", "jax")
def micro_batches_drop_alike() -> Plant:
    return in_both(
        DROPOUTS,
        "__init__",
        lambda right, self, rate, **key: right(self, rate, **key | {"micro_step": 0}),
    )


# --- attention by kernels


def call_cudnn(change: Callable[..., Any]) -> Plant:
    """Calls the kernel with other operands or another mask."""
    return wrap(jax_impl.extra.attention, "scaled_dot_product_attention", change)


@bug("attention", "attention_matches_numpy", "jax", "cudnn", "packed")
def cudnn_sees_other_documents() -> Plant:
    return call_cudnn(lambda right, q, k, v, mask, **how: right(q, k, v, None, **how))


@bug("attention", "attention_matches_numpy", "jax", "cudnn", "plain")
def cudnn_sees_what_comes() -> Plant:
    return call_cudnn(lambda right, *given, is_causal: right(*given, is_causal=False))


@bug("attention", "attention_matches_numpy", "jax", "cudnn", "plain")
def cudnn_scales_twice() -> Plant:
    return call_cudnn(lambda right, q, *rest, **how: right(q * q.shape[-1] ** -0.5, *rest, **how))


@bug("attention", "attention_matches_numpy", "jax", "cudnn", "packed")
def cudnn_s_heads_take_turns() -> Plant:
    return call_cudnn(lambda right, q, *rest, **how: right(q[:, :, ::-1], *rest, **how))


@bug("attention", "attention_matches_numpy", "jax", "flash", "plain")
def flash_heads_take_turns() -> Plant:
    return HEADS_TAKE_TURNS


@bug("attention", "attention_matches_numpy", "jax", "flash", "plain")
def flash_scales_by_all_heads() -> Plant:
    return wrap(
        jax_impl.extra.attention,
        "flash_attention",
        lambda right, q, *rest, **how: right(q * q.shape[2] ** -0.5, *rest, **how),
    )


@bug("attention", "attention_matches_numpy", "torch", "blocks", "plain")
def blocks_forget_the_scale_backward() -> Plant:
    """The values are right; the gradients of queries and keys are as of unscaled scores."""

    def unscaled(right: Callable, ctx: Any, *grads: Any) -> Any:
        dq, dk, dv = right(ctx, *grads)
        return dq * dq.shape[-1] ** 0.5, dk * dk.shape[-1] ** 0.5, dv

    return wrap(torch_ref.extra.attention.InBlocks, "backward", unscaled)


# --- the judge


@bug("judge", "norm_gap")
def gap_relative_to_ours() -> Plant:
    return wrap(compare, "norm_gap", lambda right, a, b: right(b, a))


@bug("judge", "starts_are_perturbed")
def starts_are_not_perturbed() -> Plant:
    return assign(case, "disturb", lambda weights, generator: weights)


@bug("judge", "starts_are_perturbed")
def gains_of_a_start_are_one() -> Plant:
    return wrap(
        case,
        "disturb",
        lambda right, weights, generator: {
            name: x if x.ndim > 1 else weights[name]
            for name, x in right(weights, generator).items()
        },
    )


@bug("judge", "starts_are_perturbed")
def all_starts_are_one() -> Plant:
    return wrap(
        case,
        "disturb",
        lambda right, weights, generator: right(weights, np.random.default_rng(0)),
    )


# --- remat


def count_in_segment(right: Callable, layer: Callable, blocks: list, x: Any, *, remat: str) -> Any:
    """Numbers the layers of each segment from 0."""
    spans = segments(len(blocks)) if remat == "sqrt" else [range(len(blocks))]
    numbers = [number for span in spans for number in range(len(span))]

    def renumbered(block: Any, i: Any, x: Any) -> Any:
        return layer(block, numbers[i] if isinstance(i, int) else jnp.array(numbers)[i], x)

    return right(renumbered, blocks, x, remat=remat)


def count_segments(right: Callable, segment: Callable, stacked: Any, x: Any) -> Any:
    size = len(segments(jax.tree.leaves(stacked)[0].shape[0])[0])
    return right(lambda params, i, x: segment(params, i // size, x), stacked, x)


@bug("remat", "segments_keep_their_masks", "torch", "unroll")
def segments_count_from_0() -> Plant:
    return wrap(torch_ref.model, "through_blocks", count_in_segment)


@bug("remat", "segments_keep_their_masks", "jax", "unroll")
def segments_count_from_0_jax() -> Plant:
    return wrap(jax_impl.model, "through_blocks", count_in_segment)


@bug("remat", "segments_keep_their_masks", "jax", "scan")
def segments_count_segments() -> Plant:
    return wrap(jax_impl.extra.scan, "scan_segments", count_segments)
