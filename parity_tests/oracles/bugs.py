"""Planted bugs in what both twins share, and in what is logged, evaluated, sampled and exported.

Each is a change of a function of the product, and names the check of this folder that must fail.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import torch
from onnx import numpy_helper

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
import torch_ref.twin
from lockstep.check import accept
from lockstep.cli import sample, trainers
from lockstep.config import Config, ModelConfig, huggingface
from lockstep.config import config as config_module
from lockstep.config.rope import Rope
from lockstep.data import batches, chat, prepared, tokenizer
from lockstep.data.batch import Batch
from lockstep.data.documents import Documents
from lockstep.formats.rounding import NeutralRounding
from lockstep.judge import compare
from lockstep.model import flops, params
from lockstep.monitor import history, listing, prune
from lockstep.parity import case
from lockstep.plan import roofline
from lockstep.run import checkpoint, runlog
from lockstep.train import closing, loss_scale, memory, nonfinite, sampling, track
from lockstep.train.loop import Loop, Pace
from lockstep.train.options import Watching
from lockstep.train.schedule import learning_rates
from lockstep.weights import about, adapters, export, forward, llmc, onnx_export
from lockstep.weights.merged import Weights
from parity_tests.planting import Plant, edit, edit_each, put, several, wrap


@dataclass(frozen=True)
class Bug:
    """A mistake under a name.

    Args:
        kind: the test file that has the check, without test_.
        check: the function that must fail.
        given: its arguments.
    """

    name: str
    kind: str
    check: str
    plant: Plant
    given: tuple[Any, ...] = ()


def shorten(x: Any) -> Any:
    """Numbers of six digits, in whatever they stand."""
    if isinstance(x, dict):
        return {name: shorten(value) for name, value in x.items()}
    return float(f"{x:g}") if isinstance(x, float) else x


TRAINERS = jax_impl.step.Trainer, torch_ref.step.Trainer
JAX_TRAINER, TORCH_TRAINER = TRAINERS
DROPOUTS = jax_impl.dropout.Dropout, torch_ref.dropout.Dropout
JAX_TWIN, TORCH_TWIN = jax_impl.twin.JaxTwin, torch_ref.twin.TorchTwin
SAMPLE, REPORT, TO_FLAGS = sample._sample, Loop.report, closing.to_flags

DATA: list[tuple[Any, ...]] = [
    ("targets-begin-in-a-prompt", "tokens_at_an_edge", edit(
        tokenizer.FromFile.encode, "offsets[:, 0], offsets[:, 1]",
        "offsets[:, 1] - 1, offsets[:, 1]")),
    ("targets-end-in-a-prompt", "tokens_at_an_edge", edit(
        tokenizer.FromFile.encode, "offsets[:, 0], offsets[:, 1]",
        "offsets[:, 0], offsets[:, 0] + 1")),
    ("templates-keep-blanks", "templates", edit(
        chat.compile_template, "lstrip_blocks=True", "lstrip_blocks=False"), "indented"),
    ("templates-keep-line-ends", "templates", edit(
        chat.compile_template, "trim_blocks=True", "trim_blocks=False"), "indented"),
    ("templates-lose-special-tokens", "templates", edit(
        chat.compile_template, "special, messages", "{}, messages"), "indented"),
    ("templates-escape-letters", "templates", edit(
        chat.compile_template, "ensure_ascii=False", "ensure_ascii=True"), "json"),
    ("absent-tools-are-undefined", "templates", edit(
        chat.compile_template, '{"tools": None, "documents": None}', "{}"), "tools"),
    ("marked-answers-are-lost", "templates", edit(
        chat.compile_template, "nodes.Scope(body", "nodes.Scope([]"), "generation"),
    ("windows-repeat-after-1000", "windows", edit(
        batches.batch, "micro_step, step]", "micro_step, step % 1000]")),
    ("micro-batches-alike-in-data", "windows", edit(
        batches.batch, "micro_step, step]", "micro_step % 8, step]")),
    ("seed-reaches-no-window", "windows", edit(batches.batch, "key=[seed", "key=[0")),
    ("validation-draws-as-training", "windows", edit(batches.batch, "SPLITS[split]", "0")),
    ("last-window-never-drawn", "windows", edit(
        batches._read, "len(tokens) - context", "len(tokens) - 1 - context")),
    ("own-rows-are-the-first", "own_rows", edit(
        batches.batch, "numbers[own]", "numbers[: len(own)]")),
    ("fitting-document-left-out", "packed_rows", edit(
        Documents.whole, "stop - start - 1 > left", "stop - start - 1 >= left")),
    ("no-document-after-the-last", "packed_rows", edit(
        Documents.whole, "< len(self.ends):", "< len(self.ends) - first:")),
    ("token-counts-for-its-target", "masked_stream", edit(
        Documents.taken, "self.counts[start + 1 : stop]", "self.counts[start : stop - 1]")),
    *((f"mask-of-{split}-lost", "masks", edit(
        prepared.Writer.add, "not document.counts.all()",
        f'not (document.counts.all() or self.files["bin"].name.endswith("{file}.bin"))'), file)
      for split, file in (("held-out", "val"), ("training", "train"))),
    ("documents-padded-by-their-tokenizer", "tokenizer", edit(
        tokenizer.FromFile.__init__, "_ask(self.inner.no_padding)", "pass")),
    ("documents-cut-by-their-tokenizer", "tokenizer", edit(
        tokenizer.FromFile.__init__, "_ask(self.inner.no_truncation)", "pass")),
    ("documents-begin-as-prompts", "tokenizer", edit(
        tokenizer.FromFile.encode, "add_special_tokens=False", "add_special_tokens=True")),
]  # fmt: skip


# --- initial values and decay

INITIAL: list[tuple[Any, ...]] = [
    ("residual-init-without-2", "values", edit(
        params._initial, "2 * model.n_layer", "model.n_layer"), "tiny"),
    ("positions-half-as-wide", "transformers", edit(
        params._initial, "else 0.02", 'else 0.01 if name.startswith("position") else 0.02')),
    ("weights-begin-rounded", "values", edit(
        params._initial, "generator.standard_normal(shape, np.float32) * np.float32(std)",
        '(generator.standard_normal(shape) * std).astype("bfloat16").astype("float32")'), "tiny"),
    ("adapters-of-seed-0-beside-given-weights", "seeds_of_adapters", edit(
        params.initial, "model, seed)", "model, 0 if given else seed)")),
    ("adapters-of-zeros-beside-given-weights", "seeds_of_adapters", edit(
        params.initial, "model, seed)", "model, seed) * (not given)")),
    ("adapters-a-third-as-wide", "peft", edit(
        params._initial, "shape[1] ** -0.5", "(3 * shape[1]) ** -0.5")),
    ("llm-c-s-positions-all-read", "llm_c", edit(
        llmc.read_tensors, "shapes(model)", "shapes(wanted)"), "7"),
    ("llm-c-s-layers-first", "llm_c", put(llmc, "_order", lambda model: (
        *params.shapes(model),)), "12"),
    ("llm-c-s-layers-sorted-as-text", "llm_c", edit(
        llmc._order, "range(model.n_layer)", "sorted(range(model.n_layer), key=str)"), "12"),
    ("llm-c-s-last-positions", "llm_c", edit(
        llmc.read_tensors, "read_into(stream, start,", "read_into(stream, start - "
        "found[name].nbytes + math.prod(shapes(model)[name]) * dtype.itemsize,"), "7"),
    ("adapters-add-at-the-start", "peft", edit(
        params._initial, "np.zeros(shape, np.float32)", "np.full(shape, 0.01, np.float32)")),
    ("seed-reaches-no-weight", "seeds", edit(params._initial, "key=[seed", "key=[0")),
    ("layers-begin-alike", "seeds", edit(
        params._initial, "name.encode()", 'name.lstrip("blocks.0123456789").encode()')),
    ("trained-adapters-though-frozen", "trained", edit(
        config_module.trains, "not frozen and (not model.lora_rank or name.endswith(ADAPTERS))",
        "name.endswith(ADAPTERS) if model.lora_rank else not frozen"), "lora", "*.mlp"),
    ("trained-beside-adapters", "trained", edit(
        config_module.trains, "not model.lora_rank or", "True or"), "lora", ""),
    ("trained-though-frozen", "trained", edit(config_module.trains, "not frozen and ", ""),
     "tiny", "embed,blocks.*.attn,*.norm1"),
    ("trained-but-for-one-a", "trained", edit(config_module.trains, "ADAPTERS", '".lora_b"'),
     "lora", ""),
    ("adapters-do-not-decay", "decay", edit(params.decays, "*ADAPTERS", ""), "torch", "lora"),
    ("only-a-decays", "decay", edit(params.decays, "*ADAPTERS", '".lora_a"'), "jax", "lora"),
    ("embeddings-decay", "decay", edit(
        params.decays, '"head.weight"', '"head.weight", "embed.weight"'), "torch", "tiny"),
    ("gains-decay", "decay", edit(
        params.decays, '"head.weight"', '"head.weight", "norm.weight"'), "torch", "tiny"),
    ("patterns-of-decay-forgotten", "decay", edit(
        params.decays, "not patterns or", "True or"), "torch", "tiny", "blocks.*.mlp,head"),
    ("stacked-names-decay", "decay", edit(
        JAX_TRAINER.__init__, "decays(self.canonical(n),", "decays(n,"),
     "jax", "tiny", "blocks.*.mlp,head", "scan"),
    ("stacked-names-are-frozen", "what_moves", edit(
        Config.trained, "trains(name,", 'trains(name.replace(".0", "").replace(".1", ""),'),
     "scan"),
    ("norms-of-stacked-layers-turned", "what_moves", edit(
        jax_impl.extra.scan.Stacked.by_tensor, "(measure)(x)", "(measure)(x[::-1])"),
     "scan"),
    *((f"one-program-for-layers-of-another-{name}", "one_program", edit(
        Config._patterns, "in given.items()", f'in given.items() if f != "--{flag}"'),
       flag.replace("-", "_")) for name, flag in (
        ("decay", "decay"), ("freeze", "freeze"), ("adapter", "lora-targets"))),
]  # fmt: skip


# --- schedule and resume


SCHEDULE: list[tuple[Any, ...]] = [
    ("rate-doubles-late", "steps", edit(
        learning_rates, "return np.where(",
        "return np.where(update < 31, 1, 1 + 1e-6) * np.where("), "torch"),
    ("last-rate-is-the-least", "steps", edit(
        learning_rates, "optim.steps - optim.warmup", "optim.steps - optim.warmup - 1"), "torch"),
    ("epsilon-a-hundred-times", "steps", put(torch_ref.optim, "ADAM_EPS", 1e-6), "torch"),
    ("decay-of-gradients", "steps", put(torch_ref.optim, "AdamW", torch.optim.Adam), "torch"),
    ("beta2-by-default", "steps", edit(torch_ref.optim.adamw, "config.beta2", "0.95"), "torch"),
    ("beta1-by-default-jax", "steps", edit(jax_impl.optim.adamw, "config.beta1", "0.9"), "jax"),
    ("no-clip-in-half-jax", "clip", edit(
        JAX_TRAINER.__init__, "optimizer(config.optim,", "optimizer(config.optim if not "
        "config.precision.roles.mixed else config.replace(clip=1e9).optim,"), "jax", "fp16"),
    ("no-clip-in-half-torch", "clip", edit(
        TORCH_TRAINER.clip, "self.config.optim.clip", "1e9 if self.config.precision.roles.mixed "
        "else self.config.optim.clip"), "torch", "bf16"),
    ("clip-by-a-rounded-factor-jax", "clip", edit(
        jax_impl.optim.clip_by_global_norm, "factor.astype(g.dtype)",
        "factor.astype(jnp.bfloat16).astype(g.dtype)"), "jax", "bf16"),
    ("clip-by-a-rounded-norm", "clip", edit(
        torch_ref.optim.clip_by_global_norm, "clip, norm)", "clip, norm.bfloat16())"),
     "torch", "fp16"),
    ("scale-backs-off-by-half", "resumed_after_skips", edit(
        torch_ref.step.grad_scaler, "1 / config.loss_scale_factor", "0.5"), "torch"),
    ("schedule-by-steps-after-resume", "resumed_after_skips", edit(
        torch_ref.io.bridge.load, "state.step, state.updates", "state.step, state.step"), "torch"),
    ("adam-counts-steps-after-resume", "resumed_after_skips", edit(
        jax_impl.io.bridge.load, "np.int32(state.updates)", "np.int32(state.step)"), "jax"),
    ("good-steps-lost-on-resume", "resumed_after_skips", edit(
        torch_ref.io.bridge.load, "state.good_steps", "0"), "torch"),
    ("window-of-step-0-after-resume", "resumed_run", edit(
        Loop.draw, "step, self.own_rows", "0 if step == self.first else step, self.own_rows")),
    ("rows-of-a-device-kept-on-a-mesh", "resumed_on_a_mesh", edit(
        trainers._resumed_config, "rows // size}", "config.optim.batch_size}")),
    ("tokens-restart-on-resume", "resumed_run", edit(
        REPORT, "self.done * tokens", "(self.done - self.first) * tokens")),
    ("rows-lost-on-resume", "resumed_run", put(runlog, "up_to", lambda path, step: [])),
    ("end-of-the-log-on-resume", "long_run", edit(
        runlog.up_to, "rows(path)", "rows(path, tail=True)")),
    ("rows-of-a-log-up-to-512", "long_run", wrap(
        runlog, "_lines", lambda right, stream: itertools.islice(right(stream), 512))),
    ("best-of-the-last-losses", "long_run", edit(
        checkpoint.best_of, "in losses}", "in [*losses][-8:]}")),
    *((f"{name}-of-the-end-of-the-log", "long_run", put(owner, "runlog", SimpleNamespace(
        rows=partial(runlog.rows, tail=True)))) for name, owner in (
            ("report", history), ("surplus", prune))),
    ("scale-of-any-step-before", "scale_begins", edit(
        loss_scale.carry, 'and row["step"] == state.step', "")),
    ("scale-that-fell-begins-anew", "scale_begins", edit(
        loss_scale.carry, "for row in last", "for row in ()")),
]  # fmt: skip


# --- what is logged

SETS, SET = Watching.load, "config.data.tokenizer, config.data.rows)"
LOGGED: list[tuple[Any, ...]] = [
    ("tokens-per-second-of-a-micro-batch", "clock", edit(
        REPORT, '"tokens_per_second": rate', '"tokens_per_second": rate / optim.accum'), "late"),
    ("pace-of-one-step", "clock", edit(
        Pace.step, "self.ends[0]) / (len(self.ends) - 1)", "self.ends[-2] + 1e-9)"), "slow host"),
    ("norms-tracked-as-numbers-of-a-step", "tracked_numbers", edit(
        track.finite_numbers, '"norm." if', '"" if')),
    ("all-is-tracked-as-a-norm", "tracked_numbers", edit(
        track.finite_numbers, 'else ""', 'else "norm."')),
    ("tokens-of-one-device", "clock", edit(
        REPORT, "self.done * tokens", "self.done * tokens // self.config.mesh.size"), "late"),
    ("evaluation-counts-as-training-time", "clock", edit(
        Loop.run, "if evaluate or save:", "if False:"), "late"),
    ("a-save-counts-as-training-time", "clock", edit(
        Loop.run, "if evaluate or save:", "if evaluate:"), "synchronous"),
    ("mfu-of-one-device", "clock", edit(
        REPORT, '"mfu": rate', '"mfu": rate * self.config.mesh.size'), "late"),
    ("mfu-attention-of-keys", "flops", edit(
        flops.per_token, "model.d_queries", "model.kv_heads * model.d_head"), "grouped"),
    ("mfu-attention-of-the-stream", "flops", edit(
        flops.per_token, "model.d_queries", "model.d_model"), "wide-heads"),
    ("mfu-counts-positions", "flops", edit(flops.per_token, " - positions", ""), "positions"),
    ("mfu-of-frozen", "flops", edit(flops.of_run, "- 2 * sum(", "- 0 * sum("), "lora"),
    ("mfu-takes-positions-off-twice", "flops", edit(flops.of_run, ', "position.weight"', ""),
     "frozen-positions"),
    ("mfu-without-tied-head", "flops", edit(
        flops.per_token, "- positions", "- positions - model.vocab * model.d_model * model.tied"),
     "tied"),
    ("roofline-attention-of-keys", "plan_attention", edit(
        roofline.by_kind, "shape.context * shape.d_queries", "shape.context * shape.d_keys"),
     "grouped"),
    ("roofline-of-a-micro-batch", "plan_attention", edit(
        roofline.by_kind, "s.tokens(shape)", "s.tokens(shape) / s.accum"), "positions"),
    ("grad-norm-logged-scaled", "norm_under_a_scale", edit(
        TORCH_TRAINER.report, "(loss, norm, norms)", "(loss, norm * scale, norms)"), "torch"),
    ("grad-norm-logged-scaled-jax", "norm_under_a_scale", edit(
        JAX_TRAINER.report, "StepResult(loss, norm,", "StepResult(loss, norm * scale,"), "jax"),
    ("grad-norm-logged-clipped", "norm_under_a_scale", edit(
        TORCH_TRAINER.clip, "clip, norms), norms",
        "clip, norms).clamp(max=self.config.optim.clip), norms"), "torch"),
    ("norms-of-modules-without-root", "norm_under_a_scale", edit(
        params.norms_by_module, "math.sqrt(square)", "square"), "torch"),
    ("norms-of-modules-without-bias", "norms_of_modules", edit(
        params.norms_by_module, "norms[name] ** 2",
        'norms[name] ** 2 * (not name.endswith("bias"))')),
    ("last-of-the-bad-activations", "first_bad_tensor", edit(
        nonfinite.first_bad_tensor, "_bad(trace.activations)",
        "_bad(dict(reversed(trace.activations.items())))")),
    ("last-of-the-bad-activation-grads", "first_bad_tensor", edit(
        nonfinite.first_bad_tensor, "(trace.activation_grads,",
        "(dict(reversed(trace.activation_grads.items())),")),
    ("last-of-the-bad-grads", "first_bad_tensor", edit(
        nonfinite.first_bad_tensor, "trace.grads)", "dict(reversed(trace.grads.items())))")),
    ("only-the-first-micro-batch-is-looked-into", "first_bad_tensor", edit(
        nonfinite.first_bad_tensor, "window.split()", "window.split()[:1]")),
    ("a-command-of-six-digits", "digits", edit(
        TO_FLAGS, "str(v)]", 'f"{v:g}" if type(v) is float else str(v)]')),
    ("a-record-of-six-digits", "digits", wrap(
        Config, "to_json", lambda right, self: shorten(right(self)))),
    ("set-of-packed-rows", "held_out_rows", edit(SETS, SET, "config.data.tokenizer)"), "pad"),
    ("set-of-one-stream", "held_out_rows", edit(
        SETS, SET, 'config.data.tokenizer, "stream")'), "pack"),
    ("set-of-bytes", "held_out_rows", edit(SETS, SET, '"", config.data.rows)'), "stream"),
    ("set-without-mask", "held_out_rows", edit(
        SETS, "= data.val", "= dataclasses.replace(data.val, counts=None)"), "pack"),
    ("export-of-packed-rows", "held_out_rows", edit(
        onnx_export.read_held_out, "held_out.segments is None", "True"), "pack"),
    ("set-of-what-trains", "held_out", edit(SETS, "= data.val", "= data.train")),
    ("command-without-quotes", "command", edit(closing.command, "shlex.join(", "' '.join("),
     "texts"),
    ("command-takes-all-devices", "command", edit(
        TO_FLAGS, 'given |= {"mesh": str(config.mesh)}', ""), "usual"),
    ("command-without-the-least-rate", "command", edit(
        TO_FLAGS, "in given.items()]", 'in given.items() if name != "min_lr"]'), "numbers"),
    ("command-of-one-process", "command", edit(closing.command, "else ranks", "else ''"), "mesh"),
    ("command-in-the-start-s-context", "command", edit(
        TO_FLAGS, ', "context": model.context} if init', "} if init"), "init"),
    ("finished-by-its-log", "states", edit(
        listing.state_of, "if saved >= steps", "if step >= steps")),
    ("stopped-at-any-checkpoint", "states", edit(
        listing.state_of, "saved and saved >= step", "saved")),
    ("half-a-checkpoint-counts", "states", wrap(checkpoint, "listing", lambda right, run: [
        *right(run), *(Path(run, path.name[5:]) for path in run.glob("checkpoints/.tmp-*"))])),
    ("time-left-by-all-steps", "time_left", edit(
        REPORT, "(self.done - self.first) / (now", "self.done / (now")),
    ("peak-in-kilobytes", "peak", edit(memory.resident_peak, "else 1024", "else 1")),
    ("peak-is-what-is-held-jax", "peak_of_a_device", edit(
        JAX_TWIN.peak_bytes, "peak_bytes_in_use", "bytes_in_use"), "jax"),
    ("peak-is-what-is-held", "peak_of_a_device", edit(
        TORCH_TWIN.peak_bytes, "max_memory_allocated", "memory_allocated"), "torch"),
    ("peak-is-what-is-reserved", "peak_of_a_device", edit(
        TORCH_TWIN.peak_bytes, "max_memory_allocated", "max_memory_reserved"), "torch"),
    ("peak-is-the-host-s", "peak_of_a_device", edit(
        JAX_TWIN.peak_bytes, 'stats.get("peak_bytes_in_use") or', ""), "jax"),
]  # fmt: skip


# --- evaluation and sampling


def evaluate_first_state(right: Callable, self: Any, window: Batch) -> Any:
    now = self.state
    self.state = vars(self).setdefault("first", jax.tree.map(jnp.copy, now))
    try:
        return right(self, window)
    finally:
        self.state = now


MODEL_OF_TRAINING = "self.evaluation_model(state)", "Trainer.evaluation_model(self, state)"
BY_TRAINING = edit(JAX_TRAINER.evaluate, *MODEL_OF_TRAINING)
HEADS_TAKE_TURNS = edit(
    jax_impl.model.repeat_heads, "jnp.repeat(x_BTGK, heads // groups, axis=2)",
    "jnp.tile(x_BTGK, (1, 1, heads // groups, 1))",
)  # fmt: skip
EVALUATION_MODEL = torch_ref.extra.evaluation.OtherPolicy.evaluation_model

EVALUATION: list[tuple[Any, ...]] = [
    ("stale-evaluation-weights", "evaluation_follows", edit(
        EVALUATION_MODEL, "self.whole_state()", 'vars(self).setdefault("first", '
        "{name: x.clone() for name, x in self.whole_state().items()})"), "torch"),
    ("stale-evaluation-weights-jax", "evaluation_follows", wrap(
        JAX_TRAINER, "evaluate", evaluate_first_state), "jax"),
    ("evaluation-drops-out", "evaluation_follows", edit(
        torch_ref.model.GPT.hidden, "Dropout.off()", "Dropout(self.config.dropout, seed=0, step=0, "
        "micro_step=0, strict=True)"), "torch"),
    ("evaluation-mean-in-compute-jax", "loss", edit(
        JAX_TWIN.evaluate, ".item()", '.astype("bfloat16").item()'), "jax", "bf16"),
    ("evaluation-of-the-first-batch", "loss", edit(
        TORCH_TRAINER.evaluate, "batches.split()", "batches.split()[:1]"), "torch", "bf16"),
    ("token-0-is-ignored", "loss", edit(
        torch_ref.loss.mean_loss, "batch.targets.flatten())",
        "batch.targets.flatten(), ignore_index=0)"), "torch", "bf16"),
    ("masked-loss-over-all", "loss", edit(
        torch_ref.loss.average, "over.to(losses.dtype)", "losses.shape[0]"),
     "torch", "fp64", "masked"),
    ("grouped-queries-take-turns", "grouped_queries", edit(
        torch_ref.extra.attention.sdpa, "grouped = q.shape[1] != k.shape[1]", "grouped = False\n"
        "    k, v = (x.repeat(1, q.shape[1] // x.shape[1], 1, 1) for x in (k, v))"), "torch"),
    ("grouped-queries-take-turns-in-blocks", "grouped_queries", HEADS_TAKE_TURNS, "jax"),
    ("sampled-under-training-policy", "scores_in_the_evaluation_s_policy", edit(
        TORCH_TRAINER.logits, "self.evaluation_model()", "self.model, self.roles"),
     "torch", "fp32"),
    ("sampled-under-training-policy-jax", "scores_in_the_evaluation_s_policy", edit(
        JAX_TRAINER.logits, *MODEL_OF_TRAINING), "jax", "fp32"),
    ("evaluated-with-weights-of-training-jax", "scores_in_the_evaluation_s_policy", edit(
        jax_impl.extra.evaluation.OtherPolicy.evaluation_model, "p.astype(self.eval_dtypes.param)",
        "p"), "jax", "bf16-weights"),
    ("evaluated-with-weights-of-training", "scores_in_the_evaluation_s_policy", edit(
        EVALUATION_MODEL, "model.load_state_dict", "model.float().load_state_dict"),
     "torch", "bf16-weights"),
    ("float64-s-scores-in-float32", "scores_in_the_evaluation_s_policy", edit(
        JAX_TWIN.logits, "np.float64",
        "np.float32 if self.config.precision.eval_policy else float"), "jax", "fp64"),
    ("evaluated-under-training-s-autocast", "scores_in_the_evaluation_s_policy", edit(
        EVALUATION_MODEL, "return model, dtypes.policy", "return model, self.roles"),
     "torch", "fp32"),
    ("chunks-are-evaluated-as-in-training", "loss_in_the_evaluation_s_policy", edit(
        torch_ref.extra.chunks.InChunks.batch_loss, "with autocast(roles,",
        "roles = self.roles\n    with autocast(roles,"), "torch", "3"),
    ("loss-evaluated-as-in-training", "loss_in_the_evaluation_s_policy", edit(
        TORCH_TRAINER.batch_loss, "batch, roles,", "batch, self.roles,"), "torch", "1"),
    ("chunks-are-evaluated-by-training-s-model", "loss_in_the_evaluation_s_policy", BY_TRAINING,
     "jax", "3"),
    ("evaluated-by-training-s-model", "loss_in_the_evaluation_s_policy", BY_TRAINING, "jax", "1"),
    ("evaluation-policy-forgotten", "scores_in_the_evaluation_s_policy", put(
        Config, "eval_dtypes", property(lambda self: self.dtypes)), "jax", "bf16-weights"),
    ("sample-forgets-the-policy", "the_command", edit(
        SAMPLE, 'mesh="data=1"', 'mesh="data=1", eval_policy=""')),
    ("sample-of-the-first-checkpoint", "the_command", edit(SAMPLE, "step=given.step", "step=0")),
    ("sample-of-all-the-vocabulary", "the_command", edit(SAMPLE, "vocab=vocab", "vocab=300")),
    ("sample-forgets-the-temperature", "the_command", edit(
        SAMPLE, "temperature=given.temperature", "temperature=0.8")),
    ("sample-forgets-the-seed", "the_command", edit(SAMPLE, "seed=given.seed", "seed=0")),
    ("sample-forgets-the-framework", "who_samples", edit(SAMPLE, "given.framework or ", "")),
    ("sample-forgets-the-device", "who_samples", edit(
        SAMPLE, "device=given.device", 'device="auto"')),
    ("sample-forgets-the-step", "who_samples", edit(SAMPLE, "step=given.step", "step=None")),
    ("sample-of-the-run-s-mesh", "who_samples", edit(
        SAMPLE, 'mesh="data=1"', "mesh=str(config.mesh)")),
    ("float16-evaluation-ends-the-run", "overflow", edit(
        Loop.evaluate, " or precision.eval_roles.loss_scaling", ""), "bf16", "fp16", "DONE"),
    ("lost-loss-ends-no-run", "overflow", edit(Loop.evaluate, "if not scaled and", "if False and"),
     "bf16", "bf16", "DIVERGED"),
    ("sample-context-one-short", "context", edit(
        sampling.sample, "[-context:]", "[1 - context :]")),
    ("sample-context-beyond", "context", edit(
        sampling.sample, "[-context:]", "[-1 - context :]")),
    ("temperature-multiplies", "distribution", edit(
        sampling.choose, "/ temperature", "* temperature")),
    ("top-k-one-more", "distribution", edit(
        sampling.choose, "top_k or None", "top_k + 1 if top_k else None")),
    ("top-k-of-all-is-256", "large_vocabulary", edit(
        sampling.choose, "top_k or None", "top_k or 256")),
    ("top-k-at-most-256", "large_vocabulary", edit(
        sampling.choose, "top_k or None", "min(top_k, 256) or None")),
    ("likeliest-of-the-first-256", "large_vocabulary", edit(
        sampling.choose, "np.argmax(scores)", "np.argmax(scores[:256])")),
    ("same-draw-for-each-token", "draws_are_independent", edit(
        sampling.choose, "generator.random()", "np.random.default_rng(0).random()")),
]  # fmt: skip


# --- exports


def change_zero_points(right: Callable, file: Path, windows: Iterator[np.ndarray]) -> None:
    right(file, windows)
    graph = onnx.load(file)
    for each in graph.graph.initializer:
        if each.name.endswith("_zero_point") and each.data_type == onnx.TensorProto.UINT8:
            off = numpy_helper.to_array(each) + np.uint8(1)
            each.CopyFrom(numpy_helper.from_array(off, each.name))
    onnx.save(graph, file)


def leave_out_file(*names: str) -> Plant:
    kept = {kind: tuple(n for n in getattr(about, kind) if n not in names)
            for kind in ("MODEL", "TOKENIZER")}  # fmt: skip
    return several(*(put(about, kind, left) for kind, left in kept.items()))


EPS_BY_DEFAULT = edit(forward.forward_config, "dropout=0.0", "dropout=0.0, norm_eps=1e-5")
UNMERGED = edit(Weights.merged, 'if kind == "weight"', "if False")

EXPORTS: list[tuple[Any, ...]] = [
    ("onnx-without-adapters", "export", UNMERGED, "onnx", "llama-lora"),
    ("stablehlo-without-adapters", "export", UNMERGED, "stablehlo", "llama-lora"),
    ("exported-at-another-step", "export", edit(
        forward.exported, "files_of(run, step,", "files_of(run, None,"), "onnx", "gpt2"),
    ("adapters-merged-unscaled", "export", put(ModelConfig, "lora_scale", 1.0),
     "safetensors", "gpt2-lora"),
    ("onnx-layernorm-eps-by-default", "export", EPS_BY_DEFAULT, "onnx", "gpt2"),
    ("onnx-rmsnorm-eps-by-default", "export", EPS_BY_DEFAULT, "onnx", "qwen3"),
    ("stablehlo-eps-by-default", "export", EPS_BY_DEFAULT, "stablehlo", "gpt2"),
    ("config-eps-by-default", "export", wrap(
        huggingface, "config_json", lambda right, model, *rest: right(
            replace(model, norm_eps=1e-5), *rest)), "safetensors", "qwen3"),
    ("onnx-last-place-as-the-one-before", "export", wrap(
        onnx_export, "exported", lambda right, run, to, _, **rest: right(
            run, to, "parity_tests.oracles.wrong_onnx", **rest)), "onnx", "qwen3"),
    ("int8-calibrated-on-one-window", "int8", edit(
        onnx_export.calibration, "range(CALIBRATION)", "range(1)")),
    ("int8-calibrated-on-held-out", "int8", edit(
        onnx_export.calibration, "batches.of_step(config, train, step)",
        "batches.validation(config, train)")),
    ("int8-zero-points-off", "int8", wrap(onnx_export, "quantize", change_zero_points)),
    ("peft-alpha-whole", "adapters", edit(
        adapters.write_adapters, '"lora_alpha": model.lora_alpha',
        '"lora_alpha": int(model.lora_alpha)'), "gpt2-lora"),
    ("peft-alpha-over-rank", "adapters", edit(
        adapters.write_adapters, '"lora_alpha": model.lora_alpha',
        '"lora_alpha": model.lora_alpha / model.lora_rank'), "llama-lora"),
    ("peft-adapters-of-another-step", "adapters", edit(
        export.export, "files_of(run, step,", "files_of(run, None,"), "gpt2-lora"),
    ("index-counts-float32", "index", edit(
        export._write_weights, "_bytes(shape, dtype)", '_bytes(shape, "float32")'), "bfloat16"),
    ("index-of-the-next-file", "index", edit(
        export._write_weights, "dict(sorted(where.items()))",
        "dict(zip(where, [*where.values()][1:] + [*where.values()][:1]))"), "float32"),
    ("files-below-the-largest-size", "index", edit(export._divide, "> room", ">= room"), "float32"),
    ("files-as-large-as-in-float32", "index", edit(
        export._write_weights, "_divide(layout.shapes(), dtype,",
        '_divide(layout.shapes(), "float32",'), "bfloat16"),
    ("config-is-the-start-s", "shorter_context", edit(
        export._merged, "former | content", "content | former"), "gpt2"),
    ("config-forgets-the-start", "shorter_context", edit(
        export._merged, "former | content", "content"), "gpt2"),
    ("dtype-is-the-start-s", "shorter_context", put(export, "RENAMED", ()), "gpt2"),
    ("rope-is-cut-at-the-context", "shorter_context", edit(
        export._merged, 'del content["max_position_embeddings"]', "pass"), "llama3"),
    ("rope-of-six-digits", "numbers", edit(Rope.__str__, ":.17g", ":g"), "llama"),
    ("rope-read-of-six-digits", "numbers", edit(
        huggingface.parse_rope, "float(value)", 'float(f"{float(value):g}")'), "qwen2"),
    ("epsilon-of-six-digits", "numbers", wrap(
        huggingface, "fields_of", lambda right, *given: shorten(right(*given))), "gpt2"),
    ("config-of-six-digits", "numbers", wrap(
        huggingface, "config_json", lambda right, *given: shorten(right(*given))), "qwen2"),
    ("export-without-template", "files_beside", leave_out_file("chat_template.jinja")),
    ("export-without-generation", "files_beside", leave_out_file("generation_config.json")),
    ("export-without-special-tokens", "files_beside", leave_out_file("tokenizer_config.json")),
    ("stated-loss-of-prompts", "masked_loss", edit(
        onnx_export.mean_loss, "batch.expand_counts()", "np.ones(batch.tokens.shape, bool)")),
    ("int8-loss-of-float32", "int8", wrap(onnx_export, "Exported", lambda right, size, loss, *was:
     right(size, was[1], *was))),
]  # fmt: skip

# --- narrow formats

DELAYED = torch_ref.extra.formats.delayed.Delayed
ROUNDINGS = jax_impl.extra.formats.rounding.Rounding, torch_ref.extra.formats.rounding.Rounding
MICRO_BATCHES_ALIKE = edit_each(TRAINERS, "dropout", "micro_step=micro_step", "micro_step=0")
LAYERS_ALIKE = edit_each(DROPOUTS, "key_of", "layer + 1", "1")

NARROW: list[tuple[Any, ...]] = [
    ("float64-is-rounded-to-nearest", "stochastic", edit(
        NeutralRounding.quantize, '"float32"), to, axis, draws,', '"float32"), to, axis, None,'),
     "torch", "float64"),
    ("gradients-are-rounded-to-nearest", "stochastic", edit(
        NeutralRounding.quantize, "None if draws is None else", "None if True else"),
     "jax", "float32"),
    ("micro-batches-round-alike", "draws_of_a_product", MICRO_BATCHES_ALIKE, "torch"),
    ("layers-round-alike", "draws_of_a_product", LAYERS_ALIKE, "jax"),
    ("gate-rounds-as-up", "draws_of_a_product", edit_each(
        DROPOUTS, "key_of", "SITES[site]", 'SITES[site.replace("gate", "up")]'), "torch"),
    ("seed-reaches-no-rounding", "draws_of_a_product", edit_each(
        DROPOUTS, "__init__", "self.rate", "seed = 0\n    self.rate"), "jax"),
    ("amaxes-of-the-scaled-loss", "history", edit_each(
        ROUNDINGS, "units", "[1.0, 1.0, loss_scale]", "[1.0, 1.0, 1.0]"), "jax"),
    ("history-of-one-step", "history", edit(
        NeutralRounding.record, "history[:, :-1]", "0 * history[:, :-1]"), "torch"),
    ("history-never-forgets", "history", edit(
        NeutralRounding.record, "history[:, :-1]", "0 * history[:, :-1] + self.amax(history, 1)"),
     "jax"),
    ("draws-up-to-a-half", "stochastic", edit(
        NeutralRounding.quantize, "draws.reshape(", "0.5 * draws.reshape("),
     "torch", "float32"),
    *((f"{what}-scaled-by-own-rows", "scales_of_all_rows", edit(
        ROUNDINGS[1].over_processes, "is None", f"is None or x.numel() {sizes}"), policy)
      for what, sizes, policy in (("rows", "> 1", "fp8-rowwise"), ("tensor", "== 1", "fp8"))),
    ("amaxes-of-own-loss", "histories_of_processes", edit(
        DELAYED.update_amaxes, "scale * self.processes", "scale")),
    ("scales-of-own-loss", "histories_of_processes", edit(
        DELAYED.give_scales, "get_scale() * self.processes", "get_scale()")),
    ("amaxes-of-skipped-steps", "histories_of_processes", edit(
        DELAYED.update_amaxes, "if not skipped", "if True")),
]  # fmt: skip

# --- several devices

ON_MESH, PLACE = torch_ref.extra.mesh.mesh.OnMesh, torch_ref.extra.mesh.mesh.place
OWN_ROWS, PIECES = torch_ref.extra.mesh.mesh.OwnRowsDropout, jax_impl.io.bridge.pieces

MESH: list[tuple[Any, ...]] = [
    *((f"{what}-of-a-model-draw-alike", "masks", edit(
        ON_MESH.dropout, "rank()", f'self.mesh["{axis}"].get_local_rank()'), "fast")
      for what, axis in (("parts", "data"), ("copies", "fsdp"))),
    ("turns-of-twice-the-copies", "pieces", edit(PIECES, "turns = len", "turns = 2 * len")),
    ("every-copy-is-written", "pieces", edit(PIECES, "shard.replica_id ==", "0 ==")),
    ("the-last-copy-is-not-counted", "pieces", edit(
        PIECES, "len(array.sharding.device_set)", "min(4, len(array.sharding.device_set))")),
    ("the-first-copy-alone-writes", "pieces", edit(PIECES, "== number % turns", "== 0")),
    ("parts-begin-by-whole-quotients", "places", edit(
        PLACE, '-(-len(tensor) // mesh["fsdp"].size())', 'len(tensor) // mesh["fsdp"].size()')),
    ("parts-as-even-as-can-be", "places", edit(
        PLACE, 'chunk * mesh["fsdp"].get_local_rank()',
        'len(tensor) * mesh["fsdp"].get_local_rank() // mesh["fsdp"].size()')),
    ("parts-of-all-devices", "places", edit(
        PLACE, '// mesh["fsdp"].size()', '// (mesh["data"].size() * mesh["fsdp"].size())')),
    ("a-part-is-written-by-all", "places", edit(PLACE, 'mesh["data"].get_local_rank()', "0")),
    ("devices-draw-alike", "masks", put(
        torch_ref.extra.mesh.mesh, "seed_torch", lambda key: None), "fast"),
    ("devices-draw-the-first-rows", "masks", edit(OWN_ROWS.draw, "rank() *", "0 *"), "strict"),
    ("devices-count-alone", "mean_count", edit(
        ON_MESH.mean_count, "mean(loss.count_targets(window), self.mesh)",
        "loss.count_targets(window)")),
    ("a-device-without-targets-counts-one", "mean_count", edit(
        ON_MESH.mean_count, "loss.share_count(mean(loss.count_targets(window), self.mesh), window)",
        "mean(loss.share_count(loss.count_targets(window), window), self.mesh)")),
    ("devices-draw-other-rows", "whole_mask", edit(OWN_ROWS.draw, "rank() *", "1 + rank() *")),
]  # fmt: skip

# --- dropout, wrong in both twins alike

DROPOUT: list[tuple[Any, ...]] = [
    ("embedding-is-not-dropped", "dropout", edit_each(
        DROPOUTS, "__call__", "not self.rate", 'not self.rate or site == "embedding"'), "torch"),
    ("kept-are-not-scaled", "dropout", edit_each(
        DROPOUTS, "__call__", " * (1 / (1 - self.rate))", ""), "jax"),
    ("mlp-drops-as-attention", "dropout", edit_each(
        DROPOUTS, "key_of", "SITES[site]", 'SITES[site.replace("mlp", "attention")]'), "torch"),
    ("layers-drop-alike", "dropout", LAYERS_ALIKE, "jax"),
    ("micro-batches-drop-alike", "dropout", MICRO_BATCHES_ALIKE, "jax"),
]  # fmt: skip

# --- attention

CUDNN = jax_impl.extra.attention.scaled_dot_product_attention

ATTENTION: list[tuple[Any, ...]] = [
    ("cudnn-sees-other-documents", "attention", edit(CUDNN, '"mask": mask', '"mask": None'),
     "jax", "cudnn", "packed"),
    ("cudnn-sees-what-comes", "attention", edit(
        CUDNN, '"is_causal": is_causal', '"is_causal": False'), "jax", "cudnn", "plain"),
    ("cudnn-scales-twice", "attention", edit(
        CUDNN, "attention(q,", "attention(q * q.shape[-1] ** -0.5,"), "jax", "cudnn", "plain"),
    ("cudnn-s-heads-take-turns", "attention", edit(
        CUDNN, "attention(q,", "attention(q[:, :, ::-1],"), "jax", "cudnn", "packed"),
    ("flash-heads-take-turns", "attention", HEADS_TAKE_TURNS, "jax", "flash", "plain"),
    ("flash-scales-by-all-heads", "attention", edit(
        jax_impl.extra.attention.flash_attention, "mha(q,", "mha(q * q.shape[2] ** -0.5,"),
     "jax", "flash", "plain"),
]  # fmt: skip

# --- the judge

NORM_GAP, OF_PLACE = compare.norm_gap, accept._is_place_accepted
SPOT = "max(spot.figure for spot in spots)"

JUDGE: list[tuple[Any, ...]] = [
    ("gap-of-the-squares-alone", "norm_gap", edit(NORM_GAP, "(2, np.inf) if", "(2,) if")),
    ("gap-of-the-largest-alone", "norm_gap", edit(NORM_GAP, "(2, np.inf) if", "(np.inf,) if")),
    ("gap-relative-to-ours", "norm_gap", edit(NORM_GAP, "norm(b, order)", "norm(a, order)")),
    ("gap-of-what-is-no-number-is-none", "norm_gap", edit(
        NORM_GAP, "in (a, b))", "in (np.nan_to_num(a), b))")),
    ("starts-are-not-disturbed", "starts", edit(
        case.disturb, "generator.normal(0, DISTURBANCE, weight.shape)", "np.zeros(weight.shape)")),
    ("gains-of-a-start-are-one", "starts", edit(
        case.disturb, "DISTURBANCE,", "DISTURBANCE * (weight.ndim > 1),")),
    ("all-starts-are-one", "starts", edit(
        case.disturb, "generator.normal(", "np.random.default_rng(0).normal(")),
    ("accepted-by-the-smallest", "accepted", edit(OF_PLACE, SPOT, SPOT.replace("max", "min"))),
    ("accepted-by-the-first", "accepted", edit(OF_PLACE, SPOT, "spots[0].figure")),
    ("accepted-by-the-last", "accepted", edit(OF_PLACE, SPOT, "spots[-1].figure")),
    ("one-place-accepts-all", "accepted", edit(accept.is_accepted, "all(", "any(")),
    ("one-cause-accepts-all", "accepted", edit(
        accept.Accepted.causes, "{self.what} & set(parts)",
        "set(parts) if self.what in parts else set()")),
    ("parted-at-a-row", "parting", edit(
        history.Parting.first_beyond, "self.steps[beyond[0]]", "beyond[0] + 1")),
]  # fmt: skip

# --- remat

REMAT: list[tuple[Any, ...]] = [
    ("segments-count-from-0", "segments", edit(
        torch_ref.model.through_blocks, "stop], layers.start,", "stop], 0,"), "torch", "unroll"),
    ("segments-count-from-0-jax", "segments", edit(
        jax_impl.model.through_blocks, "stop], layers.start,", "stop], 0,"), "jax", "unroll"),
    ("segments-count-segments", "segments", edit(
        jax_impl.extra.scan.scan_segments, "segment(params, i * size, x)", "segment(params, i, x)"),
     "jax", "scan"),
]  # fmt: skip

KINDS = {"data": DATA, "initial": INITIAL, "schedule": SCHEDULE, "logged": LOGGED,
         "evaluation": EVALUATION, "exports": EXPORTS, "formats": NARROW, "mesh": MESH,
         "dropout": DROPOUT, "attention": ATTENTION, "judge": JUDGE, "remat": REMAT}  # fmt: skip
BUGS = [
    Bug(name, kind, f"check_{check}", plant, tuple(given))
    for kind, bugs in KINDS.items()
    for name, check, plant, *given in bugs
]
