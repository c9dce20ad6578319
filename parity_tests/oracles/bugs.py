"""Planted bugs in what both twins share, and in what is logged, evaluated, sampled and exported.

Each is a change of a function of the product, and names the check of this folder that must fail.
"""

import itertools
import re
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
import pytest
import torch
import torch.nn.functional as F
from onnx import numpy_helper

import jax_impl.extra.evaluation
import jax_impl.io.bridge
import jax_impl.loss
import jax_impl.optim
import jax_impl.step
import jax_impl.twin
import torch_ref.extra.evaluation
import torch_ref.io.bridge
import torch_ref.loss
import torch_ref.optim
import torch_ref.step
import torch_ref.twin
from jax_impl.pure import jit_method
from lockstep.cli import sample as sample_command
from lockstep.config import Config, ModelConfig, OptimConfig
from lockstep.data import batches
from lockstep.data.batch import Batch
from lockstep.data.documents import Documents, Piece
from lockstep.model import flops, params, rotary
from lockstep.model.state import TrainState
from lockstep.plan import roofline
from lockstep.run import runlog
from lockstep.train import memory, sampling
from lockstep.train.loop import Loop
from lockstep.twin import StepResult
from lockstep.weights import export, onnx_export, onnx_graph, stablehlo

Plant = Callable[[pytest.MonkeyPatch], None]


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

    def __str__(self) -> str:
        return self.name


def bugs_of(module: str) -> pytest.MarkDecorator:
    """Parametrizes a test by the bugs that its module's checks must find."""
    found = [bug for bug in BUGS if module.endswith(f"test_{bug.kind}")]
    return pytest.mark.parametrize("bug", found, ids=str)


def put(owner: Any, name: str, value: Any) -> Plant:
    """`owner.name` becomes `value`."""
    return lambda patch: patch.setattr(owner, name, value)


def wrap(owner: Any, name: str, wrong: Callable) -> Plant:
    """`owner.name(...)` becomes `wrong(right, ...)`."""
    right = getattr(owner, name)
    return put(owner, name, lambda *args, **rest: wrong(right, *args, **rest))


def several(*plants: Plant) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        for each in plants:
            each(patch)

    return plant


# --- data


def change_draw(**changes: Callable[[Any], Any]) -> Plant:
    """A batch is drawn for other arguments."""
    return wrap(batches, "batch", lambda right, tokens, **which: right(
        tokens, **which | {name: change(which[name]) for name, change in changes.items()}
    ))  # fmt: skip


def change_rows(change: Callable[[list[Piece], Documents, int, int], list[Piece]]) -> Plant:
    """The documents of a row are others."""
    return wrap(Documents, "whole", lambda right, self, first, context: change(
        right(self, first, context), self, first, context))  # fmt: skip


def leave_out_fitting(pieces: list[Piece], _: Documents, __: int, context: int) -> list[Piece]:
    full = len(pieces) > 1 and sum(len(piece[0]) for piece in pieces) == context
    return pieces[:-1] if full else pieces


def cut_short(pieces: list[Piece], _: Documents, __: int, context: int) -> list[Piece]:
    tokens, targets, counts = pieces[0]
    cut = len(tokens) == context
    return [(tokens[:-1], targets[:-1], counts[:-1])] if cut else pieces


def count_tokens(right: Callable, self: Documents, start: int, stop: int) -> Piece:
    tokens, _, counts = right(self, start, stop)
    if self.counts is not None:
        counts = np.asarray(self.counts[start : stop - 1]).astype(bool)
    return tokens, np.where(counts, self.tokens[start + 1 : stop], 0), counts


def join_segments(right: Callable, self: Documents, *given: Any) -> Batch:
    rows = right(self, *given)
    return rows if rows.segments is None else rows._replace(segments=np.minimum(rows.segments, 1))


def swap_rows(right: Callable, *args: Any, own: np.ndarray | None = None, **rest: Any) -> Batch:
    return right(*args, own=None if own is None else np.arange(len(own)), **rest)


DATA = [
    ("windows-repeat-after-1000", "windows", change_draw(step=lambda step: step % 1000)),
    ("windows-repeat-after-65536", "windows", change_draw(step=lambda step: step % 2**16)),
    ("micro-batches-alike-in-data", "windows", change_draw(micro_step=lambda n: n % 8)),
    ("seed-reaches-no-window", "windows", change_draw(seed=lambda seed: 0)),
    ("validation-draws-as-training", "windows", put(batches, "SPLITS", {"train": 0, "val": 0})),
    ("last-window-never-drawn", "windows", wrap(batches, "_read", lambda right, tokens, *rest:
                                                right(tokens[:-1], *rest))),
    ("own-rows-are-the-first", "own_rows", wrap(batches, "batch", swap_rows)),
    ("fitting-document-left-out", "packed_rows", change_rows(leave_out_fitting)),
    ("long-document-cut-short", "packed_rows", change_rows(cut_short)),
    ("no-document-after-the-last", "packed_rows", change_rows(
        lambda pieces, self, first, _: pieces[: len(self.ends) - first])),
    ("token-counts-for-its-target", "masked_stream", wrap(Documents, "taken", count_tokens)),
    ("segments-of-one-number", "packed_rows", wrap(Documents, "draw", join_segments)),
]  # fmt: skip


# --- initial values and decay

RESIDUAL = ("attn.proj.weight", "mlp.down.weight")


def change_initial(change: Callable[..., np.ndarray]) -> Plant:
    """`change(weights, name, model)` is what a tensor begins with."""
    return wrap(params, "_initial", lambda right, name, shape, model, seed: change(
        right(name, shape, model, seed), name, model).astype(np.float32))  # fmt: skip


def begin_uniform(x: np.ndarray, name: str, _: ModelConfig) -> np.ndarray:
    if x.ndim == 1 or "lora" in name:
        return x
    return np.random.default_rng(x.size).uniform(-1, 1, x.shape) * 3**0.5 * x.std()


def name_without_layer(right: Callable, name: str, *rest: Any) -> np.ndarray:
    return right(re.sub(r"\d+\.", "", name), *rest)


def decay_also(names: Callable[[str], bool]) -> Plant:
    return change_decays(lambda right, name, patterns="": names(name) or right(name, patterns))


def decay_without(names: Callable[[str], bool]) -> Plant:
    return change_decays(lambda right, name, patterns="": not names(name) and right(name, patterns))


def change_decays(wrong: Callable) -> Plant:
    """In both twins, which share it."""
    owners = jax_impl.step, torch_ref.optim
    return several(*(wrap(owner, "decays", wrong) for owner in owners))


INITIAL: list[tuple[Any, ...]] = [
    ("residual-init-without-2", "values", change_initial(
        lambda x, name, model: x * 2**0.5 if name.endswith(RESIDUAL) else x), "tiny"),
    ("residual-init-as-any", "transformers", change_initial(
        lambda x, name, model: x * (2 * model.n_layer) ** 0.5 if name.endswith(RESIDUAL) else x)),
    ("positions-half-as-wide", "transformers", change_initial(
        lambda x, name, _: x / 2 if name.startswith("position") else x)),
    ("weights-begin-uniform", "values", change_initial(begin_uniform), "gpt2"),
    ("weights-begin-rounded", "values", change_initial(
        lambda x, name, _: x.astype(jnp.bfloat16)), "tiny"),
    ("adapters-a-third-as-wide", "peft", change_initial(
        lambda x, name, _: x * 3**-0.5 if name.endswith("lora_a") else x)),
    ("adapters-begin-normal", "peft", change_initial(
        lambda x, name, _: np.random.default_rng(0).normal(0, x.std(), x.shape)
        if name.endswith("lora_a") else x)),
    ("adapters-add-at-the-start", "peft", change_initial(
        lambda x, name, _: x + 0.01 if name.endswith("lora_b") else x)),
    ("seed-reaches-no-weight", "seeds", wrap(params, "_initial", lambda right, *given: right(
        *given[:-1], 0))),
    ("layers-begin-alike", "seeds", wrap(params, "_initial", name_without_layer)),
    ("adapters-do-not-decay", "decay", decay_without(
        lambda name: name.endswith(params.ADAPTERS)), "torch", "lora"),
    ("only-a-decays", "decay", decay_without(
        lambda name: name.endswith(".lora_b")), "jax", "lora"),
    ("embeddings-decay", "decay", decay_also(
        lambda name: name.startswith("embed")), "torch", "tiny"),
    ("positions-decay", "decay", decay_also(
        lambda name: name.startswith("position")), "torch", "gpt2"),
    ("gains-decay", "decay", decay_also(lambda name: "norm" in name), "torch", "tiny"),
    ("biases-decay", "decay", decay_also(lambda name: name.endswith("bias")), "torch", "gpt2"),
    ("head-does-not-decay", "decay", decay_without(
        lambda name: name.startswith("head")), "torch", "tiny"),
    ("patterns-of-decay-forgotten", "decay", change_decays(
        lambda right, name, patterns="": right(name)), "torch", "tiny", "blocks.*.mlp,head"),
]  # fmt: skip


# --- schedule and resume


def change_rates(*owners: Any, change: Callable[[np.ndarray, OptimConfig], np.ndarray]) -> Plant:
    return several(*(wrap(owner, "learning_rates", lambda right, optim: change(
        right(optim), optim)) for owner in owners))  # fmt: skip


def end_at_least(rates: np.ndarray, optim: OptimConfig) -> np.ndarray:
    """The last rate is `min_lr`, as where steps are counted from 0 to steps - 1."""
    done = np.maximum(np.arange(optim.steps) - optim.warmup, 0)
    left = (1 + np.cos(np.pi * done / (optim.steps - optim.warmup - 1))) / 2
    falling = optim.min_lr + (optim.lr - optim.min_lr) * left
    return np.where(np.arange(optim.steps) < optim.warmup, rates, falling)


def load_changed(owner: Any, **changes: Callable[[TrainState], Any]) -> Plant:
    """A state is loaded with other fields."""
    return wrap(owner, "load", lambda right, trainer, state: right(trainer, replace(
        state, **{name: change(state) for name, change in changes.items()})))  # fmt: skip


def count_updates_as_steps(right: Callable, trainer: Any, state: TrainState) -> None:
    right(trainer, state)
    trainer.updates = state.step


def init_without_clip(right: Callable, self: Any, config: Config, *rest: Any) -> None:
    half = config.precision.roles.compute in ("float16", "bfloat16")
    right(self, config.replace(clip=1e9) if half else config, *rest)


def draw_window_of_step_0(right: Callable, self: Loop, step: int) -> Any:
    return right(self, 0 if step == self.first else step)


def change_rows_written(change: Callable[[Loop, dict[str, Any]], dict[str, Any]]) -> Plant:
    """Fields of a train row that the log gets."""

    def write(right: Callable, self: Loop, row: dict[str, Any]) -> None:
        right(self, row | change(self, row) if row["kind"] == "train" else row)

    return wrap(Loop, "write", write)


def micro_batches(loop: Loop) -> int:
    return loop.config.optim.accum


SCHEDULE: list[tuple[Any, ...]] = [
    ("rate-doubles-late", "steps", change_rates(torch_ref.step, change=lambda rates, _: np.where(
        np.arange(len(rates)) < 31, rates, rates * (1 + 1e-6))), "torch"),
    ("update-by-another-rate-late", "steps", change_rates(
        jax_impl.optim, change=lambda rates, _: np.where(
            np.arange(len(rates)) < 31, rates, rates * (1 + 1e-6))), "jax"),
    ("last-rate-is-the-least", "steps", change_rates(
        torch_ref.step, jax_impl.step, jax_impl.optim, change=end_at_least), "torch"),
    ("epsilon-a-hundred-times", "steps", put(torch_ref.optim, "ADAM_EPS", 1e-6), "torch"),
    ("decay-of-gradients", "steps", put(torch_ref.optim, "AdamW", torch.optim.Adam), "torch"),
    ("clip-without-1e-6", "steps", wrap(jax_impl.optim, "clip_by_global_norm", lambda right, clip,
     norms: right(clip * (1 + 1e-6), norms)), "jax"),
    ("no-clip-in-half-jax", "clip", wrap(jax_impl.step.Trainer, "__init__", init_without_clip),
     "jax", "fp16"),
    ("no-clip-in-half-torch", "clip", wrap(torch_ref.step.Trainer, "__init__", init_without_clip),
     "torch", "bf16"),
    ("clips-the-scaled-gradient", "clip", put(torch_ref.step.Trainer, "unscale", lambda self: None),
     "torch", "fp16"),
    ("schedule-by-steps-after-resume", "resumed_after_skips",
     wrap(torch_ref.io.bridge, "load", count_updates_as_steps), "torch"),
    ("adam-counts-steps-after-resume", "resumed_after_skips",
     load_changed(jax_impl.io.bridge, updates=lambda state: state.step), "jax"),
    ("good-steps-lost-on-resume", "resumed_after_skips",
     load_changed(torch_ref.io.bridge, good_steps=lambda state: 0), "torch"),
    ("scale-begins-anew-on-resume", "resumed_after_skips", load_changed(
        torch_ref.io.bridge, loss_scale=lambda state: 2.0**16), "torch"),
    ("second-moment-lost-on-resume", "resumed_after_skips", load_changed(
        torch_ref.io.bridge, nu=lambda state: {n: 0 * x for n, x in state.nu.items()}), "torch"),
    ("window-of-step-0-after-resume", "resumed_run", wrap(Loop, "draw", draw_window_of_step_0)),
    ("window-of-one-step-later", "resumed_run", wrap(Loop, "draw", lambda right, self, step: right(
        self, step + 1))),
    ("tokens-restart-on-resume", "resumed_run", change_rows_written(lambda loop, row: {
        "tokens": row["tokens"] * (row["step"] - loop.first) // row["step"]})),
    ("rows-lost-on-resume", "resumed_run", put(runlog, "up_to", lambda path, step: [])),
]  # fmt: skip


# --- what is logged


def log_rate(change: Callable[[Loop, float], float]) -> Plant:
    return change_rows_written(
        lambda loop, row: {"tokens_per_second": change(loop, row["tokens_per_second"])}
    )


def log_mfu(change: Callable[[Loop, float], float]) -> Plant:
    return change_rows_written(lambda loop, row: {"mfu": change(loop, row["mfu"])})


def report_from_last_report(right: Callable, self: Loop, result: StepResult) -> None:
    """The rate is since the last row, whatever came between."""
    self.last = vars(self).get("reported", self.last)
    right(self, result)
    vars(self)["reported"] = self.last


def report_from_last_evaluation(right: Callable, self: Loop, result: StepResult) -> None:
    """Only an evaluation stops the clock."""
    if self.done not in self.losses:
        self.last = vars(self).get("reported", self.last)
    right(self, result)
    vars(self)["reported"] = self.last


def attention_of(width: Callable[[ModelConfig], int]) -> Plant:
    def per_token(right: Callable, model: ModelConfig) -> int:
        changed = 12 * model.n_layer * (width(model) - model.d_queries) * model.context
        return right(model) + changed

    return wrap(flops, "per_token", per_token)


def flops_with_positions(right: Callable, config: Config) -> int:
    model = config.model
    positions = model.context * model.d_model * (model.position == "learned")
    return right(config) - 2 * positions * ("position.weight" not in config.trained)


def log_scaled_norm(right: Callable, self: Any, loss: Any, norm: Any, norms: Any, rate: float,
                    scale: float, skipped: bool) -> Any:  # fmt: skip
    return right(self, loss, norm * scale, norms, rate, scale, skipped)


def log_clipped_norm(right: Callable, self: Any) -> Any:
    norm, norms = right(self)
    return norm.clamp(max=self.config.optim.clip), norms


def change_metrics(**changes: Callable[[Any], Any]) -> Plant:
    """JAX's metrics of a step are others."""
    return wrap(jax_impl.step.Trainer, "report", lambda right, self, metrics: right(
        self, metrics._replace(**{name: f(metrics) for name, f in changes.items()})))  # fmt: skip


LOGGED: list[tuple[Any, ...]] = [
    ("tokens-per-second-of-a-micro-batch", "clock", log_rate(
        lambda loop, rate: rate / micro_batches(loop)), "late"),
    ("tokens-per-second-of-one-device", "clock", log_rate(
        lambda loop, rate: rate / loop.config.mesh.size), "late"),
    ("tokens-of-one-device", "clock", change_rows_written(
        lambda loop, row: {"tokens": row["tokens"] // loop.config.mesh.size}), "late"),
    ("evaluation-counts-as-training-time", "clock",
     wrap(Loop, "report", report_from_last_report), "late"),
    ("a-save-counts-as-training-time", "clock",
     wrap(Loop, "report", report_from_last_evaluation), "synchronous"),
    ("seconds-without-evaluations", "clock", change_rows_written(
        lambda loop, row: {"seconds": 2.0 * row["step"]}), "late"),
    ("mfu-of-one-device", "clock", log_mfu(lambda loop, mfu: mfu * loop.config.mesh.size), "late"),
    ("mfu-over-sparse-peak", "clock", log_mfu(lambda loop, mfu: mfu / 2), "synchronous"),
    ("mfu-attention-of-keys", "flops", attention_of(
        lambda model: model.kv_heads * model.d_head), "grouped"),
    ("mfu-attention-causal", "flops", attention_of(lambda model: model.d_queries // 2), "plain"),
    ("mfu-counts-positions", "flops", wrap(flops, "per_token", lambda right, model: right(model)
     + 6 * model.context * model.d_model * (model.position == "learned")), "positions"),
    ("mfu-of-frozen", "flops", put(flops, "of_run", lambda config: flops.per_token(config.model)),
     "lora"),
    ("mfu-takes-positions-off-twice", "flops", wrap(flops, "of_run", flops_with_positions),
     "frozen-positions"),
    ("mfu-without-tied-head", "flops", wrap(flops, "per_token", lambda right, model: right(model)
     - 6 * model.vocab * model.d_model * model.tied), "tied"),
    ("roofline-attention-of-keys", "plan_attention", wrap(
        roofline, "by_kind", lambda right, shape, how: right(
            replace(shape, d_queries=shape.d_keys), how)), "grouped"),
    ("roofline-attention-of-the-model", "plan_attention", wrap(
        roofline, "by_kind", lambda right, shape, how: right(
            replace(shape, d_queries=2 * shape.d_model), how)), "plain"),
    ("roofline-of-a-micro-batch", "plan_attention", wrap(
        roofline, "by_kind", lambda right, shape, how: right(shape, replace(how, accum=1))),
     "positions"),
    ("grad-norm-logged-scaled", "norm_under_a_scale",
     wrap(torch_ref.step.Trainer, "report", log_scaled_norm), "torch"),
    ("grad-norm-logged-scaled-jax", "norm_under_a_scale", change_metrics(
        grad_norm=lambda metrics: metrics.grad_norm * metrics.loss_scale), "jax"),
    ("grad-norm-logged-clipped", "norm_under_a_scale",
     wrap(torch_ref.step.Trainer, "clip", log_clipped_norm), "torch"),
    ("norms-logged-scaled-jax", "norm_under_a_scale", change_metrics(
        norms=lambda metrics: metrics.norms * metrics.loss_scale), "jax"),
    ("norms-of-modules-without-root", "norm_under_a_scale", wrap(
        params, "norms_by_module", lambda right, *given: {
            module: norm**2 for module, norm in right(*given).items()}), "torch"),
    ("scale-logged-is-the-next", "norm_under_a_scale", wrap(
        torch_ref.step.Trainer, "report", lambda right, self, loss, norm, norms, rate, scale,
        skipped: right(self, loss, norm, norms, rate, scale * 2, skipped)), "torch"),
    ("peak-in-kilobytes", "peak", wrap(memory, "resident_peak", lambda right: right() // 1024)),
    ("peak-of-kilobytes-of-1000", "peak", wrap(memory, "resident_peak", lambda right: int(
        right() / 1.024))),
]  # fmt: skip


# --- evaluation and sampling


def evaluate_first_model(right: Callable, self: Any) -> Any:
    return vars(self).setdefault("first", right(self))


def evaluate_first_state(right: Callable, self: Any, window: Batch) -> Any:
    now = self.state
    self.state = vars(self).setdefault("first", jax.tree.map(jnp.copy, now))
    try:
        return right(self, window)
    finally:
        self.state = now


def evaluate_as_a_step(right: Callable, self: Any, window: Batch) -> Any:
    """The next masks are those of a step later."""
    self.steps += 1
    return right(self, window)


def evaluate_rounded(right: Callable, self: Any, window: Batch) -> float:
    return float(np.float32(right(self, window)).astype(jnp.bfloat16))


def evaluate_with_dropout(right: Callable, self: Any, window: Batch) -> Any:
    usual = torch_ref.step.batch_loss
    self.eager_loss = lambda model, batch, roles, _, over: usual(
        model, batch, roles, self.dropout(0), over
    )
    return right(self, window)


@torch.no_grad()
def torch_logits_in_training_policy(self: Any, batch: Batch) -> Any:
    with torch_ref.step.autocast(self.roles, self.device):
        return self.model(batch)


def logits(self: Any, state: Any, batch: Batch) -> Any:
    """Of JAX, in the policy that trains."""
    return jax_impl.step.Trainer.evaluation_model(self, state)(batch)


def ignore_token_0(right: Callable, logits: Any, targets: Any, dtype: Any) -> Any:
    return jnp.where(targets == 0, 0, right(logits, targets, dtype))


def divide_by_all(right: Callable, losses: Any, counts: Any, over: Any) -> Any:
    return right(losses, counts, None if over is None else over * 0 + losses.shape[0])


def change_sampling(**changes: Callable[[Any], Any]) -> Plant:
    return wrap(sampling, "sample", lambda right, twin, prompt, **how: right(
        twin, prompt, **how | {name: change(how[name]) for name, change in changes.items()}
    ))  # fmt: skip


def change_choice(**changes: Callable[[Any], Any]) -> Plant:
    names = ("scores", "temperature", "top_k", "generator")

    def choose(right: Callable, *given: Any) -> int:
        known = dict(zip(names, given))
        return right(**known | {name: change(known[name]) for name, change in changes.items()})

    return wrap(sampling, "choose", choose)


def begin_generator_anew(generator: Any) -> np.random.Generator:
    return np.random.default_rng(0)


def divide_after_top_k(right: Callable, scores: np.ndarray, temperature: float, *rest: Any) -> int:
    """A temperature that moves the scores towards their mean, and not their differences."""
    return right(scores.clip(-temperature, None), temperature, *rest)


NUMBERS = itertools.count()
TRAINER = torch_ref.step.Trainer, jax_impl.step.Trainer
EVALUATION: list[tuple[Any, ...]] = [
    ("stale-evaluation-weights", "evaluation_follows", wrap(
        torch_ref.extra.evaluation.OtherPolicy, "evaluation_model", evaluate_first_model), "torch"),
    ("stale-evaluation-weights-jax", "evaluation_follows", wrap(
        jax_impl.step.Trainer, "evaluate", evaluate_first_state), "jax"),
    ("stale-scores-jax", "evaluation_follows", wrap(
        jax_impl.step.Trainer, "logits", evaluate_first_state), "jax"),
    ("evaluation-drops-out", "evaluation_follows", wrap(
        TRAINER[0], "evaluate", evaluate_with_dropout), "torch"),
    ("evaluation-is-a-step", "evaluation_follows", wrap(
        TRAINER[0], "evaluate", evaluate_as_a_step), "torch"),
    ("evaluation-mean-in-compute-jax", "loss", wrap(
        jax_impl.twin.JaxTwin, "evaluate", evaluate_rounded), "jax", "bf16"),
    ("evaluation-mean-in-compute", "loss", wrap(
        torch_ref.twin.TorchTwin, "evaluate", evaluate_rounded), "torch", "bf16"),
    ("evaluation-of-the-first-batch", "loss", wrap(
        TRAINER[0], "evaluate", lambda right, self, window: right(
            self, window.select(slice(1)))), "torch", "bf16"),
    ("token-0-is-ignored", "loss", put(torch_ref.loss, "F", SimpleNamespace(
        cross_entropy=partial(F.cross_entropy, ignore_index=0))), "torch", "bf16"),
    ("token-0-is-ignored-jax", "loss", wrap(jax_impl.loss, "row_losses", ignore_token_0),
     "jax", "bf16"),
    ("token-0-is-ignored-in-chunks", "loss", put(torch_ref.loss, "F", SimpleNamespace(
        cross_entropy=partial(F.cross_entropy, ignore_index=0))), "torch", "fp64", "chunks"),
    ("masked-loss-over-all", "loss", wrap(torch_ref.loss, "average", divide_by_all),
     "torch", "fp64", "masked"),
    ("sampled-under-training-policy", "scores_in_the_evaluation_s_policy", put(
        TRAINER[0], "logits", torch_logits_in_training_policy), "torch"),
    ("sampled-under-training-policy-jax", "scores_in_the_evaluation_s_policy", put(
        TRAINER[1], "logits", jit_method(logits)), "jax"),
    ("sample-forgets-the-policy", "the_command", wrap(
        sample_command.directory, "read_record", lambda right, run: replace(
            right(run), config=right(run).config.replace(eval_policy="")))),
    ("sample-of-the-first-weights", "the_command", wrap(
        sample_command.trainer, "restore", lambda right, config, *rest, **how: replace(
            right(config, *rest, **how), params=params.initial(config.model, 1)))),
    ("sample-context-one-short", "context", change_sampling(context=lambda context: context - 1)),
    ("sample-context-beyond", "context", change_sampling(context=lambda context: context + 1)),
    ("sample-forgets-the-first", "context", wrap(sampling, "sample", lambda right, twin, prompt,
     **how: right(twin, prompt[1:], **how))),
    ("temperature-multiplies", "distribution", change_choice(temperature=lambda t: 1 / t)),
    ("temperature-squared", "distribution", change_choice(temperature=lambda t: t**2)),
    ("top-k-one-more", "distribution", change_choice(top_k=lambda k: k + 1 if k else 0)),
    ("top-k-ignored", "distribution", change_choice(top_k=lambda k: 0)),
    ("scores-clipped", "distribution", wrap(sampling, "choose", divide_after_top_k)),
    ("same-draw-for-each-token", "draws_are_independent", change_choice(
        generator=begin_generator_anew)),
    ("seed-reaches-no-sample", "draws_are_independent", change_sampling(seed=lambda seed: 0)),
    ("sample-is-not-seeded", "draws_are_independent", change_sampling(
        seed=lambda seed: next(NUMBERS))),
]  # fmt: skip


# --- exports


def unmerged(right: Callable, files: list[Path], model: ModelConfig) -> Any:
    """Weights whose adapters nobody adds."""
    weights = right(files, model)
    return SimpleNamespace(
        model=model, dtype=weights.dtype, read=weights.read,
        merged=lambda name, dtype: weights.read(name).astype(dtype),
    )  # fmt: skip


def op_by_default(right: Callable, self: Any, kind: str, *inputs: str, **rest: Any) -> Any:
    if kind == "LayerNormalization":
        rest.pop("epsilon")
    return right(self, kind, *inputs, **rest)


def take_turns(right: Callable, self: Any, kind: str, *inputs: str, **rest: Any) -> Any:
    """Heads of queries share keys in another order."""
    return right(self, kind, *inputs, **rest | ({"axis": 1} if rest.get("axis") == 2 else {}))


def change_zero_points(right: Callable, file: Path, windows: Iterator[np.ndarray]) -> None:
    right(file, windows)
    graph = onnx.load(file)
    for each in graph.graph.initializer:
        if each.name.endswith("_zero_point") and each.data_type == onnx.TensorProto.UINT8:
            off = numpy_helper.to_array(each) + np.uint8(1)
            each.CopyFrom(numpy_helper.from_array(off, each.name))
    onnx.save(graph, file)


def calibrate(change: Callable[[Iterator], Any]) -> Plant:
    return wrap(onnx_export, "calibration", lambda right, *given: iter(change(right(*given))))


def calibrate_on_held_out(config: Config, train: Any) -> Iterator[np.ndarray]:
    yield from batches.validation(config, train).tokens.astype(np.int64)


def quantize_by_tensor(right: Callable, *given: Any) -> None:
    from onnxruntime import quantization

    usual = quantization.quantize_static
    quantization.quantize_static = lambda *args, **how: usual(*args, **how | {"per_channel": False})
    try:
        right(*given)
    finally:
        quantization.quantize_static = usual


def with_plain_eps(right: Callable, model: ModelConfig, *rest: Any) -> Any:
    return right(replace(model, norm_eps=1e-5), *rest)


EXPORTS: list[tuple[Any, ...]] = [
    ("onnx-without-adapters", "export", wrap(onnx_export, "open_weights", unmerged),
     "onnx", "llama-lora"),
    ("stablehlo-without-adapters", "export", wrap(stablehlo, "open_weights", unmerged),
     "stablehlo", "llama-lora"),
    ("safetensors-without-adapters", "export", wrap(export, "open_weights", unmerged),
     "safetensors", "gpt2-lora"),
    ("adapters-merged-unscaled", "export", put(ModelConfig, "lora_scale", 1.0),
     "onnx", "gpt2-lora"),
    ("adapters-merged-by-alpha-alone", "export", put(
        ModelConfig, "lora_scale", property(lambda model: model.lora_alpha)), "onnx", "llama-lora"),
    ("onnx-layernorm-eps-by-default", "export", wrap(onnx_graph.Graph, "op", op_by_default),
     "onnx", "gpt2"),
    ("onnx-rmsnorm-eps-by-default", "export", wrap(onnx_graph, "build", with_plain_eps),
     "onnx", "llama"),
    ("stablehlo-eps-by-default", "export", wrap(stablehlo, "forward_config", with_plain_eps),
     "stablehlo", "gpt2"),
    ("config-eps-by-default", "export", wrap(export.huggingface, "config_json", with_plain_eps),
     "safetensors", "llama"),
    ("onnx-rope-by-default", "export", wrap(onnx_graph, "build", lambda right, model, *rest: right(
        replace(model, rope="base=10000"), *rest)), "onnx", "llama-lora"),
    ("onnx-last-place-as-the-one-before", "export", wrap(rotary, "table", lambda right, *given:
     tuple(np.concatenate([x[:-1], x[-2:-1]]) for x in right(*given))), "onnx", "llama"),
    ("onnx-heads-take-turns", "export", wrap(onnx_graph.Graph, "op", take_turns), "onnx", "llama"),
    ("int8-calibrated-on-one-window", "int8", calibrate(lambda windows: [next(windows)])),
    ("int8-calibrated-on-seven-windows", "int8", calibrate(lambda windows: [*windows][:-1])),
    ("int8-calibrated-on-held-out", "int8", put(onnx_export, "calibration", calibrate_on_held_out)),
    ("int8-zero-points-off", "int8", wrap(onnx_export, "quantize", change_zero_points)),
    ("int8-one-scale-a-weight", "int8", wrap(onnx_export, "quantize", quantize_by_tensor)),
    ("int8-loss-of-float32", "int8", wrap(onnx_export, "Exported", lambda right, size, loss, *was:
     right(size, was[1], *was))),
]  # fmt: skip

KINDS = {"data": DATA, "initial": INITIAL, "schedule": SCHEDULE, "logged": LOGGED,
         "evaluation": EVALUATION, "exports": EXPORTS}  # fmt: skip
BUGS = [
    Bug(name, kind, f"check_{check}", plant, tuple(given))
    for kind, bugs in KINDS.items()
    for name, check, plant, *given in bugs
]
