"""Planted bugs of training semantics, each with the oracle that must fail under it.

Most are in code that both twins share, or are the same in both, so that no comparison of the twins
shows them. Bugs of one twin are in `lockstep.parity.catalogue`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
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
from lockstep.data import batches
from lockstep.data.batch import Batch
from lockstep.data.documents import Documents, Piece
from lockstep.formats.rounding import NeutralRounding
from lockstep.judge import compare
from lockstep.model import params
from lockstep.model.segments import segments
from lockstep.model.stacked import is_stacked
from lockstep.parity import case
from lockstep.train import loss_scale
from mutants.patch import Plant, after, assign, both, wrap


@dataclass(frozen=True)
class Bug:
    """A mistake under a name.

    Args:
        file: the test file of this folder that has the oracle, without test_.
        test: the test that must fail, without test_.
        arguments: the test's.
    """

    name: str
    file: str
    test: str
    plant: Plant
    arguments: tuple[Any, ...] = ()


JAX, TORCH = jax_impl.step.Trainer, torch_ref.step.Trainer
DROPOUTS = jax_impl.dropout.Dropout, torch_ref.dropout.Dropout
ROUNDINGS = jax_impl.extra.formats.rounding.Rounding, torch_ref.extra.formats.rounding.Rounding
JAX_EVALUATION = jax_impl.extra.evaluation.OtherPolicy
TORCH_EVALUATION = torch_ref.extra.evaluation.OtherPolicy


def in_both(owners: tuple[Any, ...], name: str, wrong: Callable) -> Plant:
    return both(*(wrap(owner, name, wrong) for owner in owners))


# --- the windows of the data


def with_key(**change: Callable[[Any], Any]) -> Plant:
    """Draws each micro-batch by another seed, split, step or micro-step."""
    return wrap(batches, "batch", lambda right, tokens, **key: right(
        tokens, **{name: change.get(name, lambda x: x)(x) for name, x in key.items()}))  # fmt: skip


def read_first_rows(
    right: Callable, tokens: Any, own: np.ndarray | None = None, **key: Any
) -> Batch:
    drawn = right(tokens, **key)
    if own is None:
        return drawn

    def put(rows: np.ndarray) -> np.ndarray:
        found = np.zeros_like(rows)
        found[own] = rows[: len(own)]
        return found

    return drawn.map_arrays(put)


def leave_out_fitting(right: Callable, self: Documents, first: int, context: int) -> list[Piece]:
    pieces = right(self, first, context)
    filled = sum(len(tokens) for tokens, *_ in pieces) == context
    return pieces[:-1] if filled and len(pieces) > 1 else pieces


def stop_at_last(right: Callable, self: Documents, first: int, context: int) -> list[Piece]:
    assert self.ends is not None
    return right(self, first, context)[: len(self.ends) - first]


def count_tokens(self: Documents, start: int, stop: int) -> Piece:
    tokens, counts = self.tokens[start:stop].astype(np.int32), self.counts
    assert counts is not None
    own = counts[start : stop - 1].astype(bool)
    return tokens[:-1], np.where(own, tokens[1:], 0), own


DATA: list[tuple[Any, ...]] = [
    ("windows-repeat-after-1000", "windows_match_philox", with_key(step=lambda step: step % 1000)),
    ("micro-batches-alike-in-data", "windows_match_philox", with_key(
        micro_step=lambda micro_step: micro_step % 8)),
    ("seed-reaches-no-window", "windows_match_philox", with_key(seed=lambda seed: 0)),
    ("validation-draws-as-training", "windows_match_philox", with_key(
        split=lambda split: "train")),
    ("last-window-never-drawn", "windows_match_philox", wrap(
        batches, "_read", lambda right, tokens, *rest: right(tokens[:-1], *rest))),
    ("own-rows-are-the-first", "own_rows_are_read_alone", wrap(batches, "batch", read_first_rows)),
    ("fitting-document-left-out", "packed_rows", wrap(Documents, "whole", leave_out_fitting)),
    ("no-document-after-the-last", "packed_rows", wrap(Documents, "whole", stop_at_last)),
    ("token-counts-for-its-target", "masked_stream", assign(Documents, "taken", count_tokens)),
]  # fmt: skip


# --- initial values, decay, and what is trained


def change_initial(change: Callable[[str, np.ndarray], np.ndarray]) -> Plant:
    """Changes each tensor that is drawn."""
    return wrap(params, "_initial", lambda right, name, *rest: change(name, right(name, *rest)))


def change_ends(name: str, x: np.ndarray) -> np.ndarray:
    residual = name.endswith(("attn.proj.weight", "mlp.down.weight"))
    return x * np.float32(math.sqrt(2)) if residual else x


def trains_if(rule: Callable[[bool, bool, bool], bool]) -> Plant:
    """Decides by whether a tensor is frozen, whether there are adapters, and whether it is one."""

    def wrong(right: Callable, name: str, model: Any, patterns: str) -> bool:
        frozen = not right(name, replace(model, lora_rank=0), patterns)
        return rule(frozen, model.lora_rank > 0, name.endswith(ADAPTERS))

    return wrap(config_module, "trains", wrong)


def decays_if(rule: Callable[[bool, str], bool]) -> Plant:
    """In both twins, by whether a tensor should and by its name."""
    owners = jax_impl.step, torch_ref.optim
    return in_both(owners, "decays", lambda right, name, *patterns: rule(
        right(name, *patterns), name))  # fmt: skip


def reverse_layers(right: Callable, self: Any, measure: Callable, tensors: Any) -> jax.Array:
    return right(self, measure, {n: x[::-1] if is_stacked(n) else x for n, x in tensors.items()})


EVERY = "embed,blocks.*.attn,*.norm1"
INITIAL: list[tuple[Any, ...]] = [
    ("residual-init-without-2", "initial_values", change_initial(change_ends), "tiny"),
    ("positions-half-as-wide", "initial_values_match_transformers", change_initial(
        lambda name, x: x / 2 if name.startswith("position") else x)),
    ("weights-begin-rounded", "initial_values", change_initial(
        lambda name, x: x.astype("bfloat16").astype(np.float32)), "tiny"),
    ("adapters-of-seed-0-beside-given-weights", "adapters_beside_given_weights", wrap(
        params, "initial", lambda right, model, seed, given=None: right(
            model, 0 if given else seed, given))),
    ("adapters-a-third-as-wide", "adapters_match_peft", change_initial(
        lambda name, x: x / np.float32(math.sqrt(3)) if name.endswith(".lora_a") else x)),
    ("adapters-add-at-the-start", "adapters_match_peft", change_initial(
        lambda name, x: x + np.float32(0.01) if name.endswith(".lora_b") else x)),
    ("seed-reaches-no-weight", "seeds_draw_other_weights", wrap(
        params, "_initial", lambda right, name, shape, model, seed: right(name, shape, model, 0))),
    ("layers-begin-alike", "seeds_draw_other_weights", wrap(
        params, "_initial", lambda right, name, *rest: right(
            name.lstrip("blocks.0123456789"), *rest))),
    ("trained-adapters-though-frozen", "trained_parameters", trains_if(
        lambda frozen, lora, adapter: adapter if lora else not frozen), "lora", "*.mlp"),
    ("trained-beside-adapters", "trained_parameters", trains_if(
        lambda frozen, lora, adapter: not frozen), "lora", ""),
    ("trained-though-frozen", "trained_parameters", trains_if(
        lambda frozen, lora, adapter: adapter or not lora), "tiny", EVERY),
    ("trained-but-for-one-a", "trained_parameters", wrap(
        config_module, "trains", lambda right, name, *rest: right(name, *rest)
        and not name.endswith("lora_a")), "lora", ""),
    ("adapters-do-not-decay", "decay", decays_if(
        lambda decays, name: decays and not name.endswith(ADAPTERS)),
     "torch", "lora", "", "unroll"),
    ("only-a-decays", "decay", decays_if(
        lambda decays, name: decays and not name.endswith(".lora_b")),
     "jax", "lora", "", "unroll"),
    ("embeddings-decay", "decay", decays_if(
        lambda decays, name: decays or name == "embed.weight"), "torch", "tiny", "", "unroll"),
    ("gains-decay", "decay", decays_if(
        lambda decays, name: decays or name == "norm.weight"), "torch", "tiny", "", "unroll"),
    ("patterns-of-decay-forgotten", "decay", in_both(
        (jax_impl.step, torch_ref.optim), "decays", lambda right, name, patterns: right(name)),
     "torch", "tiny", "blocks.*.mlp,head", "unroll"),
    ("stacked-names-decay", "decay", wrap(
        jax_impl.step, "decays", lambda right, name, patterns: right(
            name.replace("blocks.0.", "blocks.") if name.startswith("blocks") else name,
            patterns)), "jax", "tiny", "blocks.*.mlp,head", "scan"),
    ("stacked-names-are-frozen", "frozen_parameters_stay", wrap(
        config_module, "trains", lambda right, name, *rest: right(
            name.replace(".0", "").replace(".1", ""), *rest)), "scan", "jax"),
    ("norms-of-stacked-layers-turned", "frozen_parameters_stay", wrap(
        jax_impl.extra.scan.Stacked, "by_tensor", reverse_layers), "scan", "jax"),
]  # fmt: skip


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
    return wrap(bridge, "load", lambda right, trainer, state: right(trainer, change(state)))


SCHEDULE: list[tuple[Any, ...]] = [
    ("rate-doubles-late", "steps_match_manual_adamw", with_rates(lambda rates: np.where(
        np.arange(len(rates)) < 31, rates, rates * (1 + 1e-6))), "torch"),
    ("last-rate-is-the-least", "steps_match_manual_adamw", with_rates(lambda rates: np.append(
        rates[:-1], rates.max() / 10)), "torch"),
    ("epsilon-a-hundred-times", "steps_match_manual_adamw", assign(
        torch_ref.optim, "ADAM_EPS", 1e-6), "torch"),
    ("decay-of-gradients", "steps_match_manual_adamw", assign(
        torch_ref.optim, "AdamW", torch.optim.Adam), "torch"),
    ("beta2-by-default", "steps_match_manual_adamw", wrap(
        torch_ref.step, "adamw", lambda right, model, optim: right(
            model, replace(optim, beta2=0.95))), "torch"),
    ("beta1-by-default-jax", "steps_match_manual_adamw", wrap(
        jax_impl.optim, "adamw", lambda right, optim, *rest: right(
            replace(optim, beta1=0.9), *rest)), "jax"),
    ("clip-by-a-rounded-factor-jax", "clipping_under_half_precision", wrap(
        jax_impl.optim, "clip_by_global_norm", clip_by_rounded_factor), "jax", "bf16"),
    ("clip-by-a-rounded-norm", "clipping_under_half_precision", wrap(
        torch_ref.optim, "clip_grads_with_norm_", lambda right, parameters, clip, norm: right(
            parameters, clip, norm.bfloat16())), "torch", "fp16"),
    ("scale-backs-off-by-half", "resumed_after_skips", after(
        TORCH, "__init__", lambda self, *rest: self.scaler.set_backoff_factor(0.5)), "torch"),
    ("adam-counts-steps-after-resume", "resumed_after_skips", with_state(
        jax_impl.io.bridge, lambda state: replace(state, updates=state.step)), "jax"),
    ("good-steps-lost-on-resume", "resumed_after_skips", with_state(
        torch_ref.io.bridge, lambda state: replace(state, good_steps=0)), "torch"),
    ("scale-of-any-step-before", "loss_scale_after_a_change_of_policy", wrap(
        loss_scale, "carry", lambda right, state, config, rows: right(
            state, config, [row | {"step": state.step} for row in rows]))),
    ("scale-that-fell-begins-anew", "loss_scale_after_a_change_of_policy", wrap(
        loss_scale, "carry", lambda right, state, config, rows: right(state, config, []))),
]  # fmt: skip


# --- evaluation


def tile_heads(right: Callable, function: Any, q: Any, k: Any, v: Any, **how: Any) -> Any:
    repeats = q.shape[2] // k.shape[2]
    return right(function, q, k.repeat(1, 1, repeats, 1), v.repeat(1, 1, repeats, 1), **how)


HEADS_TAKE_TURNS = in_both(
    (jax_impl.model, jax_impl.extra.attention), "repeat_heads",
    lambda right, x, heads: jnp.tile(x, (1, 1, heads // x.shape[2], 1)),
)  # fmt: skip


def evaluate_in_float32(self: Any) -> Any:
    """Loads weights of the training's dtype in place of the evaluation's."""
    model = self.make_eval_model().float()
    model.load_state_dict(self.whole_state())
    return model, self.config.eval_dtypes.policy


def evaluate_by_training(right: Callable, self: Any, batches: Batch) -> jax.Array:
    with mock.patch.object(self, "evaluation_model", partial(JAX.evaluation_model, self)):
        return right(self, batches)


BY_TRAINING = wrap(JAX, "evaluate", evaluate_by_training)
EVALUATION: list[tuple[Any, ...]] = [
    ("evaluation-of-the-first-batch", "loss_matches_numpy", wrap(
        TORCH, "evaluate", lambda right, self, batches: right(self, batches.select(slice(1)))),
     "torch", "bf16", ""),
    ("token-0-is-ignored", "loss_matches_numpy", wrap(
        F, "cross_entropy", lambda right, *given, **how: right(*given, ignore_index=0, **how)),
     "torch", "bf16", ""),
    ("masked-loss-over-all", "loss_matches_numpy", assign(
        torch_ref.loss, "average", lambda losses, counts, over: (
            torch.where(counts, losses, 0).mean())), "torch", "fp64", "masked"),
    ("grouped-queries-take-turns", "grouped_queries_match_transformers", wrap(
        torch_ref.extra.attention, "sdpa", tile_heads), "torch"),
    ("grouped-queries-take-turns-in-blocks", "grouped_queries_match_transformers",
     HEADS_TAKE_TURNS, "jax"),
    ("evaluated-with-weights-of-training-jax", "scores_in_the_evaluation_policy", assign(
        JAX_EVALUATION, "evaluation_model", lambda self, state: self.eval_model(state.params)),
     "jax", "bf16-weights"),
    ("evaluated-with-weights-of-training", "scores_in_the_evaluation_policy", assign(
        TORCH_EVALUATION, "evaluation_model", evaluate_in_float32), "torch", "bf16-weights"),
    ("float64-s-scores-in-float32", "scores_in_the_evaluation_policy", wrap(
        jax_impl.twin.JaxTwin, "logits", lambda right, self, tokens: right(self, tokens).astype(
            np.float32 if self.config.precision.eval_policy else np.float64)), "jax", "fp64"),
    ("evaluated-under-training-s-autocast", "scores_in_the_evaluation_policy", wrap(
        TORCH_EVALUATION, "evaluation_model", lambda right, self: (right(self)[0], self.roles)),
     "torch", "fp32"),
    ("chunks-are-evaluated-as-in-training", "loss_in_the_evaluation_policy", wrap(
        torch_ref.extra.chunks.InChunks, "batch_loss",
        lambda right, self, model, batch, roles, *rest: right(
            self, model, batch, self.roles, *rest)), "torch", "3"),
    ("loss-evaluated-as-in-training", "loss_in_the_evaluation_policy", wrap(
        TORCH, "batch_loss", lambda right, self, model, batch, roles, *rest: right(
            self, model, batch, self.roles, *rest)), "torch", "1"),
    ("chunks-are-evaluated-by-training-s-model", "loss_in_the_evaluation_policy", BY_TRAINING,
     "jax", "3"),
    ("evaluated-by-training-s-model", "loss_in_the_evaluation_policy", BY_TRAINING, "jax", "1"),
    ("evaluation-policy-forgotten", "scores_in_the_evaluation_policy", assign(
        Config, "eval_dtypes", property(lambda self: self.dtypes)), "jax", "bf16-weights"),
]  # fmt: skip


# --- delayed scaling

DELAYED = torch_ref.extra.formats.delayed.Delayed


def record_over(history: Callable[[Any, Any], Any]) -> Plant:
    """Records a step's amaxes in front of another history."""
    return wrap(NeutralRounding, "record", lambda right, self, kept, *found: right(
        self, history(self, kept), *found))  # fmt: skip


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


FORMATS: list[tuple[Any, ...]] = [
    ("amaxes-of-the-scaled-loss", "history_of_amaxes", in_both(
        ROUNDINGS, "units", lambda right, self, history, scale: right(self, history, 1.0)), "jax"),
    ("history-of-one-step", "history_of_amaxes", record_over(
        lambda self, history: 0 * history), "torch"),
    ("history-never-forgets", "history_of_amaxes", record_over(
        lambda self, history: 0 * history + self.amax(history, 1)), "jax"),
    ("tensor-scaled-by-own-rows", "scales_of_all_rows", wrap(
        ROUNDINGS[1], "over_processes", lambda right, self, x: (
            x if x.numel() == 1 else right(self, x))), "fp8"),
    ("amaxes-of-own-loss", "histories_of_processes", assign(
        DELAYED, "update_amaxes", record_alone)),
    ("scales-of-own-loss", "histories_of_processes", forget_processes("give_scales")),
    ("amaxes-of-skipped-steps", "histories_of_processes", wrap(
        DELAYED, "update_amaxes", lambda right, self, found, scale, skipped: right(
            self, found, scale, skipped=False))),
]  # fmt: skip


# --- several devices

MESH_MODULE = torch_ref.extra.mesh.mesh
OnMesh, OwnRowsDropout = MESH_MODULE.OnMesh, MESH_MODULE.OwnRowsDropout


def seed_by_axis(axis: str) -> Plant:
    """Ranks that differ in the other axis draw the same masks."""

    def wrong(right: Callable, self: Any, micro_step: int) -> Any:
        with mock.patch.object(MESH_MODULE, "rank", self.mesh[axis].get_local_rank):
            return right(self, micro_step)

    return wrap(OnMesh, "dropout", wrong)


def draw_next_rows(right: Callable, self: Any, key: Any, x: torch.Tensor) -> torch.Tensor:
    with mock.patch.object(MESH_MODULE, "rank", lambda right=MESH_MODULE.rank: right() + 1):
        return right(self, key, x)


def count_own(self: Any, window: Batch) -> torch.Tensor:
    loss = MESH_MODULE.loss
    return MESH_MODULE.mean(loss.share_count(loss.count_targets(window), window), self.mesh)


MESH: list[tuple[Any, ...]] = [
    ("parts-of-a-model-draw-alike", "masks_of_devices_are_independent", seed_by_axis("data"),
     "fast"),
    ("copies-of-a-model-draw-alike", "masks_of_devices_are_independent", seed_by_axis("fsdp"),
     "fast"),
    ("devices-draw-alike", "masks_of_devices_are_independent", assign(
        MESH_MODULE, "seed_torch", lambda key: None), "fast"),
    ("devices-draw-the-first-rows", "masks_of_devices_are_independent", assign(
        OwnRowsDropout, "draw", torch_ref.dropout.Dropout.draw), "strict"),
    ("devices-draw-other-rows", "strict_masks_match_one_device", wrap(
        OwnRowsDropout, "draw", draw_next_rows)),
    ("devices-count-alone", "mean_count_over_devices", wrap(
        MESH_MODULE, "mean", lambda right, x, mesh: (right(x.clone(), mesh), x)[1])),
    ("a-device-without-targets-counts-one", "mean_count_over_devices", assign(
        OnMesh, "mean_count", count_own)),
]  # fmt: skip


# --- dropout, wrong in both twins alike


def keep_embedding(right: Callable, self: Any, x: Any, layer: Any, site: str) -> Any:
    return x if site == "embedding" else right(self, x, layer, site)


def drop_without_scale(right: Callable, self: Any, x: Any, *place: Any) -> Any:
    return right(self, x, *place) * (1 - self.rate)


DROPOUT: list[tuple[Any, ...]] = [
    ("embedding-is-not-dropped", "dropout_matches_transformers", in_both(
        DROPOUTS, "__call__", keep_embedding), "torch"),
    ("kept-are-not-scaled", "dropout_matches_transformers", in_both(
        DROPOUTS, "__call__", drop_without_scale), "jax"),
    ("mlp-drops-as-attention", "dropout_matches_transformers", in_both(
        DROPOUTS, "key_of", lambda right, self, layer, site: right(
            self, layer, site.replace("mlp", "attention"))), "torch"),
    ("layers-drop-alike", "dropout_matches_transformers", in_both(
        DROPOUTS, "key_of", lambda right, self, layer, site: right(self, 0, site)), "jax"),
    ("micro-batches-drop-alike", "dropout_matches_transformers", in_both(
        DROPOUTS, "__init__", lambda right, self, rate, **key: right(
            self, rate, **key | {"micro_step": 0})), "jax"),
]  # fmt: skip


# --- attention by kernels


def call_cudnn(change: Callable[..., Any]) -> Plant:
    """Calls the kernel with other operands or another mask."""
    return wrap(jax_impl.extra.attention, "scaled_dot_product_attention", change)


ATTENTION: list[tuple[Any, ...]] = [
    ("cudnn-sees-other-documents", "attention_matches_numpy", call_cudnn(
        lambda right, q, k, v, mask, **how: right(q, k, v, None, **how)),
     "jax", "cudnn", "packed"),
    ("cudnn-sees-what-comes", "attention_matches_numpy", call_cudnn(
        lambda right, *given, is_causal: right(*given, is_causal=False)),
     "jax", "cudnn", "plain"),
    ("cudnn-scales-twice", "attention_matches_numpy", call_cudnn(
        lambda right, q, *rest, **how: right(q * q.shape[-1] ** -0.5, *rest, **how)),
     "jax", "cudnn", "plain"),
    ("cudnn-s-heads-take-turns", "attention_matches_numpy", call_cudnn(
        lambda right, q, *rest, **how: right(q[:, :, ::-1], *rest, **how)),
     "jax", "cudnn", "packed"),
    ("flash-heads-take-turns", "attention_matches_numpy", HEADS_TAKE_TURNS,
     "jax", "flash", "plain"),
    ("flash-scales-by-all-heads", "attention_matches_numpy", wrap(
        jax_impl.extra.attention, "flash_attention", lambda right, q, *rest, **how: right(
            q * q.shape[2] ** -0.5, *rest, **how)), "jax", "flash", "plain"),
]  # fmt: skip


# --- the judge

JUDGE: list[tuple[Any, ...]] = [
    ("gap-relative-to-ours", "norm_gap", wrap(compare, "norm_gap", lambda right, a, b: right(
        b, a))),
    ("starts-are-not-perturbed", "starts_are_perturbed", assign(
        case, "disturb", lambda weights, generator: weights)),
    ("gains-of-a-start-are-one", "starts_are_perturbed", wrap(
        case, "disturb", lambda right, weights, generator: {
            name: x if x.ndim > 1 else weights[name]
            for name, x in right(weights, generator).items()})),
    ("all-starts-are-one", "starts_are_perturbed", wrap(
        case, "disturb", lambda right, weights, generator: right(
            weights, np.random.default_rng(0)))),
]  # fmt: skip


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


REMAT: list[tuple[Any, ...]] = [
    ("segments-count-from-0", "segments_keep_their_masks", wrap(
        torch_ref.model, "through_blocks", count_in_segment), "torch", "unroll"),
    ("segments-count-from-0-jax", "segments_keep_their_masks", wrap(
        jax_impl.model, "through_blocks", count_in_segment), "jax", "unroll"),
    ("segments-count-segments", "segments_keep_their_masks", wrap(
        jax_impl.extra.scan, "scan_segments", count_segments), "jax", "scan"),
]  # fmt: skip

FILES = {"data": DATA, "initial": INITIAL, "schedule": SCHEDULE, "evaluation": EVALUATION,
         "formats": FORMATS, "mesh": MESH, "dropout": DROPOUT, "attention": ATTENTION,
         "judge": JUDGE, "remat": REMAT}  # fmt: skip
BUGS = [
    Bug(name, file, test, plant, tuple(arguments))
    for file, bugs in FILES.items()
    for name, test, plant, *arguments in bugs
]
