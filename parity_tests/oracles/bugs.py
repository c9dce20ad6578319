"""Planted bugs in what both twins share, and in what is logged, evaluated, sampled and exported.

Each is a change of a function of the product, and names the check of this folder that must fail.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import jinja2.sandbox
import numpy as np
import onnx
import optax
import pytest
import torch
import torch.nn.functional as F
from onnx import numpy_helper

import jax_impl.dropout
import jax_impl.extra.attention
import jax_impl.extra.evaluation
import jax_impl.extra.formats.rounding
import jax_impl.extra.scan
import jax_impl.io.bridge
import jax_impl.loss
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
from jax_impl.pure import jit_method
from lockstep.check import accept
from lockstep.check.locate import Root
from lockstep.check.rungs import Spot
from lockstep.cli import sample as sample_command
from lockstep.cli import trainers
from lockstep.config import Config, ModelConfig, OptimConfig, huggingface
from lockstep.config import config as config_module
from lockstep.config.rope import Rope
from lockstep.data import batches, chat, corpus, prepared, tokenizer
from lockstep.data.batch import Batch
from lockstep.data.documents import Documents, Piece
from lockstep.formats import rounding
from lockstep.judge import compare
from lockstep.model import flops, params
from lockstep.model.segments import segments
from lockstep.model.stacked import is_stacked
from lockstep.model.state import TrainState
from lockstep.monitor import history, listing, prune
from lockstep.parity import case
from lockstep.plan import roofline
from lockstep.run import checkpoint, directory, runlog
from lockstep.train import closing, loss_scale, memory, nonfinite, sampling, track
from lockstep.train.loop import Diverged, Loop
from lockstep.twin import BatchTrace, StepResult
from lockstep.weights import about, adapters, export, forward, llmc, onnx_export
from lockstep.weights.huggingface import INDEX
from torch_ref.dropout import Dropout

Plant = Callable[[pytest.MonkeyPatch], None]


def shorten(x: Any) -> Any:
    """Numbers of six digits, in whatever they stand."""
    if isinstance(x, dict):
        return {name: shorten(value) for name, value in x.items()}
    return float(f"{x:g}") if isinstance(x, float) else x


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


def count_tokens(right: Callable, self: Documents, start: int, stop: int) -> Piece:
    tokens, _, counts = right(self, start, stop)
    if self.counts is not None:
        counts = np.asarray(self.counts[start : stop - 1]).astype(bool)
    return tokens, np.where(counts, self.tokens[start + 1 : stop], 0), counts


def swap_rows(right: Callable, *args: Any, own: np.ndarray | None = None, **rest: Any) -> Batch:
    return right(*args, own=None if own is None else np.arange(len(own)), **rest)


def forget_mask_of(split: str) -> Plant:
    """Drops a split's mask, so that all of the split counts."""

    def add(right: Callable, self: prepared.Writer, document: prepared.Document) -> None:
        right(self, document)
        self.masked &= Path(self.files["bin"].name).stem != split

    return wrap(prepared.Writer, "add", add)


def leave_out_setting(name: str) -> Plant:
    """A tokenizer keeps what its file says of the lengths of texts."""
    return wrap(tokenizer, "_ask", lambda right, function, *args, **named: (
        None if getattr(function, "__name__", "") == name else right(function, *args, **named)
    ))  # fmt: skip


def add_special_tokens(right: Callable, function: Callable, *args: Any, **named: Any) -> Any:
    asked = named.keys() & {"add_special_tokens"}
    return right(function, *args, **named | dict.fromkeys(asked, True))


def change_environment(**changed: Any) -> Plant:
    """Our templates are compiled in another environment; transformers has its own by now."""
    return wrap(jinja2.sandbox, "ImmutableSandboxedEnvironment", lambda right, **how: right(
        **how | changed))  # fmt: skip


def leave_out_absent(right: Callable, self: Any, *special: Any, **given: Any) -> str:
    """Ours passes a dict of special tokens, transformers each by its name."""
    absent = {"tools", "documents"} if special else set()
    return right(self, *special, **{n: x for n, x in given.items() if n not in absent})


def change_edges(change: Callable[[Any], Any]) -> Plant:
    """`change(encoded)` says where tokens begin and end in a text."""
    return wrap(tokenizer.FromFile, "encode", lambda right, self, texts: [
        change(each) for each in right(self, texts)])  # fmt: skip


DATA: list[tuple[Any, ...]] = [
    ("targets-begin-in-a-prompt", "tokens_at_an_edge", change_edges(
        lambda token: token._replace(starts=token.stops - 1))),
    ("targets-end-in-a-prompt", "tokens_at_an_edge", change_edges(
        lambda token: token._replace(stops=token.starts + 1))),
    ("templates-keep-blanks", "templates", change_environment(lstrip_blocks=False), "indented"),
    ("templates-keep-line-ends", "templates", change_environment(trim_blocks=False), "indented"),
    ("templates-lose-special-tokens", "templates", wrap(
        chat, "compile_template", lambda right, template, special: right(template, {})),
     "indented"),
    ("templates-escape-letters", "templates", put(chat, "json", SimpleNamespace(
        dumps=lambda x, ensure_ascii, **how: json.dumps(x, **how))), "json"),
    ("absent-tools-are-undefined", "templates", wrap(
        jinja2.Template, "render", leave_out_absent), "tools"),
    ("marked-answers-are-lost", "templates", wrap(
        jinja2.nodes, "Scope", lambda right, body, **how: right([], **how)), "generation"),
    ("windows-repeat-after-1000", "windows", change_draw(step=lambda step: step % 1000)),
    ("micro-batches-alike-in-data", "windows", change_draw(micro_step=lambda n: n % 8)),
    ("seed-reaches-no-window", "windows", change_draw(seed=lambda seed: 0)),
    ("validation-draws-as-training", "windows", put(batches, "SPLITS", {"train": 0, "val": 0})),
    ("last-window-never-drawn", "windows", wrap(batches, "_read", lambda right, tokens, *rest:
                                                right(tokens[:-1], *rest))),
    ("own-rows-are-the-first", "own_rows", wrap(batches, "batch", swap_rows)),
    ("fitting-document-left-out", "packed_rows", change_rows(leave_out_fitting)),
    ("no-document-after-the-last", "packed_rows", change_rows(
        lambda pieces, self, first, _: pieces[: len(self.ends) - first])),
    ("token-counts-for-its-target", "masked_stream", wrap(Documents, "taken", count_tokens)),
    ("mask-of-held-out-lost", "masks", forget_mask_of("val"), "val"),
    ("mask-of-training-lost", "masks", forget_mask_of("train"), "train"),
    ("documents-padded-by-their-tokenizer", "tokenizer", leave_out_setting("no_padding")),
    ("documents-cut-by-their-tokenizer", "tokenizer", leave_out_setting("no_truncation")),
    ("documents-begin-as-prompts", "tokenizer", wrap(tokenizer, "_ask", add_special_tokens)),
]  # fmt: skip


# --- initial values and decay

RESIDUAL = ("attn.proj.weight", "mlp.down.weight")
STACKED = jax_impl.extra.scan.Stacked


def change_initial(change: Callable[..., np.ndarray]) -> Plant:
    """`change(weights, name, model)` is what a tensor begins with."""
    return wrap(params, "_initial", lambda right, name, shape, model, seed: change(
        right(name, shape, model, seed), name, model).astype(np.float32))  # fmt: skip


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


def decay_by_own_names(right: Callable, optim: OptimConfig, mask: Any, *rest: Any) -> Any:
    """Names of stacked layers, blocks.mlp.up.weight, are taken for the model's."""
    return right(optim, {name: params.decays(name, optim.decay) for name in mask}, *rest)


def freeze_by_own_names(config: Config) -> list[str]:
    stacked = {name: re.sub(r"\.\d+", "", name) for name in params.shapes(config.model)}
    trains, freeze = config_module.trains, config.optim.freeze
    return [name for name, own in stacked.items() if trains(own, config.model, freeze)]


def turn_layers(right: Callable, self: Any, measure: Callable, tensors: Any) -> Any:
    """Puts the last layer of a stack first."""
    return right(self, measure, {
        name: x[::-1] if is_stacked(name) else x for name, x in tensors.items()})  # fmt: skip


def leave_out_pattern(flag: str) -> Plant:
    """Layers in which this flag is not the same pass for alike."""
    right = Config._patterns.fget  # type: ignore[attr-defined]
    return put(Config, "_patterns", property(lambda self: {
        name: x for name, x in right(self).items() if name != flag}))  # fmt: skip


READ_TENSORS = llmc.read_tensors


def last_positions(right: Callable, stream: Any, begin: int, model: Any, wanted: Any, dtype: Any
                   ) -> Any:  # fmt: skip
    found = right(stream, begin, model, model, dtype)
    return found | {"position.weight": found["position.weight"][-wanted.context :]}


def sort_layers(right: Callable, model: Any) -> Iterator[str]:
    """Layer 10 comes before layer 2."""
    alike = itertools.groupby(right(model), lambda name: re.sub(r"\.\d+", "", name))
    return itertools.chain.from_iterable(sorted(names) for _, names in alike)


INITIAL: list[tuple[Any, ...]] = [
    ("residual-init-without-2", "values", change_initial(
        lambda x, name, model: x * 2**0.5 if name.endswith(RESIDUAL) else x), "tiny"),
    ("positions-half-as-wide", "transformers", change_initial(
        lambda x, name, _: x / 2 if name.startswith("position") else x)),
    ("weights-begin-rounded", "values", change_initial(
        lambda x, name, _: x.astype(jnp.bfloat16)), "tiny"),
    ("adapters-of-seed-0-beside-given-weights", "seeds_of_adapters", wrap(
        params, "initial", lambda right, model, seed, given=None: right(
            model, 0 if given else seed, given))),
    ("adapters-of-zeros-beside-given-weights", "seeds_of_adapters", wrap(
        params, "initial", lambda right, model, seed, given=None: {
            name: x * 0 if given and "lora" in name else x
            for name, x in right(model, seed, given).items()})),
    ("adapters-a-third-as-wide", "peft", change_initial(
        lambda x, name, _: x * 3**-0.5 if name.endswith("lora_a") else x)),
    ("llm-c-s-positions-all-read", "llm_c", put(
        llmc, "read_tensors", lambda stream, begin, model, wanted, dtype: READ_TENSORS(
            stream, begin, wanted, wanted, dtype)), "7"),
    ("llm-c-s-layers-first", "llm_c", put(llmc, "_order", lambda model: (
        *params.shapes(model),)), "12"),
    ("llm-c-s-layers-sorted-as-text", "llm_c", wrap(llmc, "_order", sort_layers), "12"),
    ("llm-c-s-last-positions", "llm_c", wrap(llmc, "read_tensors", last_positions), "7"),
    ("adapters-add-at-the-start", "peft", change_initial(
        lambda x, name, _: x + 0.01 if name.endswith("lora_b") else x)),
    ("seed-reaches-no-weight", "seeds", wrap(params, "_initial", lambda right, *given: right(
        *given[:-1], 0))),
    ("layers-begin-alike", "seeds", wrap(params, "_initial", name_without_layer)),
    *((f"trained-{name}", "trained", put(config_module, "trains", trains), model, patterns)
      for name, trains, model, patterns in (
          ("adapters-though-frozen", lambda name, model, freeze="": model.lora_rank > 0
           and name.endswith(params.ADAPTERS), "lora", "*.mlp"),
          ("beside-adapters", lambda name, model, freeze="": True, "lora", ""),
          ("though-frozen", lambda name, model, freeze="": True, "tiny",
           "embed,blocks.*.attn,*.norm1"),
          ("but-for-one-a", lambda name, model, freeze="": name.endswith(".lora_b"), "lora", ""))),
    ("adapters-do-not-decay", "decay", decay_without(
        lambda name: name.endswith(params.ADAPTERS)), "torch", "lora"),
    ("only-a-decays", "decay", decay_without(
        lambda name: name.endswith(".lora_b")), "jax", "lora"),
    ("embeddings-decay", "decay", decay_also(
        lambda name: name.startswith("embed")), "torch", "tiny"),
    ("gains-decay", "decay", decay_also(lambda name: "norm" in name), "torch", "tiny"),
    ("patterns-of-decay-forgotten", "decay", change_decays(
        lambda right, name, patterns="": right(name)), "torch", "tiny", "blocks.*.mlp,head"),
    ("stacked-names-decay", "decay", wrap(jax_impl.step, "optimizer", decay_by_own_names),
     "jax", "tiny", "blocks.*.mlp,head", "scan"),
    ("stacked-names-are-frozen", "what_moves", put(
        Config, "trained", property(freeze_by_own_names)), "scan"),
    ("norms-of-stacked-layers-turned", "what_moves", wrap(STACKED, "by_tensor", turn_layers),
     "scan"),
    *((f"one-program-for-layers-of-another-{name}", "one_program", leave_out_pattern(f"--{flag}"),
       flag.replace("-", "_")) for name, flag in (
        ("decay", "decay"), ("freeze", "freeze"), ("adapter", "lora-targets"))),
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


def clip_by_rounded(right: Callable, clip: float, norms: Any) -> Any:
    """Clipping whose factor is rounded to bfloat16."""
    exact = right(clip, norms)

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        clipped, state = exact.update(grads, state, params)
        factor = jnp.minimum(1.0, clip / (state.grad_norm + 1e-6))
        off = factor.astype(jnp.bfloat16) / factor
        return jax.tree.map(lambda g: g * off.astype(g.dtype), clipped), state

    return optax.GradientTransformation(exact.init, update)


def back_off_by_half(right: Callable, *given: Any) -> Any:
    scaler = right(*given)
    scaler.set_backoff_factor(0.5)
    return scaler


def init_without_clip(right: Callable, self: Any, config: Config, *rest: Any) -> None:
    half = config.precision.roles.compute in ("float16", "bfloat16")
    right(self, config.replace(clip=1e9) if half else config, *rest)


def keep_rows_of_a_device(
    right: Callable, framework: str, out: Path, given: dict[str, Any]
) -> Config:
    rows = directory.read_record(out).config.optim.batch_size
    return right(framework, out, given).replace(batch_size=rows)


def draw_window_of_step_0(right: Callable, self: Loop, step: int) -> Any:
    return right(self, 0 if step == self.first else step)


def change_rows_written(change: Callable[[Loop, dict[str, Any]], dict[str, Any]]) -> Plant:
    """Fields of a train row that the log gets."""

    def write(right: Callable, self: Loop, row: dict[str, Any]) -> None:
        right(self, row | change(self, row) if row["kind"] == "train" else row)

    return wrap(Loop, "write", write)


SCHEDULE: list[tuple[Any, ...]] = [
    ("rate-doubles-late", "steps", change_rates(torch_ref.step, change=lambda rates, _: np.where(
        np.arange(len(rates)) < 31, rates, rates * (1 + 1e-6))), "torch"),
    ("last-rate-is-the-least", "steps", change_rates(
        torch_ref.step, jax_impl.step, jax_impl.optim, change=end_at_least), "torch"),
    ("epsilon-a-hundred-times", "steps", put(torch_ref.optim, "ADAM_EPS", 1e-6), "torch"),
    ("decay-of-gradients", "steps", put(torch_ref.optim, "AdamW", torch.optim.Adam), "torch"),
    ("beta2-by-default", "steps", wrap(torch_ref.step, "adamw", lambda right, model, optim: right(
        model, replace(optim, beta2=0.95))), "torch"),
    ("beta1-by-default-jax", "steps", wrap(
        jax_impl.step, "optimizer", lambda right, optim, *rest: right(
            replace(optim, beta1=0.9), *rest)), "jax"),
    ("no-clip-in-half-jax", "clip", wrap(jax_impl.step.Trainer, "__init__", init_without_clip),
     "jax", "fp16"),
    ("no-clip-in-half-torch", "clip", wrap(torch_ref.step.Trainer, "__init__", init_without_clip),
     "torch", "bf16"),
    ("clip-by-a-rounded-factor-jax", "clip", wrap(
        jax_impl.optim, "clip_by_global_norm", clip_by_rounded), "jax", "bf16"),
    ("clip-by-a-rounded-norm", "clip", wrap(
        torch_ref.optim, "clip_grads_with_norm_", lambda right, parameters, clip, norm: right(
            parameters, clip, norm.bfloat16())), "torch", "fp16"),
    ("scale-backs-off-by-half", "resumed_after_skips",
     wrap(torch_ref.step, "grad_scaler", back_off_by_half), "torch"),
    ("schedule-by-steps-after-resume", "resumed_after_skips",
     wrap(torch_ref.io.bridge, "load", count_updates_as_steps), "torch"),
    ("adam-counts-steps-after-resume", "resumed_after_skips",
     load_changed(jax_impl.io.bridge, updates=lambda state: state.step), "jax"),
    ("good-steps-lost-on-resume", "resumed_after_skips",
     load_changed(torch_ref.io.bridge, good_steps=lambda state: 0), "torch"),
    ("window-of-step-0-after-resume", "resumed_run", wrap(Loop, "draw", draw_window_of_step_0)),
    ("rows-of-a-device-kept-on-a-mesh", "resumed_on_a_mesh", wrap(
        trainers, "_resumed_config", keep_rows_of_a_device)),
    ("tokens-restart-on-resume", "resumed_run", change_rows_written(lambda loop, row: {
        "tokens": row["tokens"] * (row["step"] - loop.first) // row["step"]})),
    ("rows-lost-on-resume", "resumed_run", put(runlog, "up_to", lambda path, step: [])),
    ("end-of-the-log-on-resume", "long_run", put(runlog, "up_to", lambda path, step: [
        row for row in runlog.rows(path, tail=True) if row["step"] <= step])),
    ("rows-of-a-log-up-to-512", "long_run", wrap(
        runlog, "_lines", lambda right, stream: itertools.islice(right(stream), 512))),
    ("best-of-the-last-losses", "long_run", wrap(
        checkpoint, "best_of", lambda right, paths, losses: right(
            paths, dict([*losses.items()][-8:])))),
    *((f"{name}-of-the-end-of-the-log", "long_run", put(owner, "runlog", SimpleNamespace(
        rows=partial(runlog.rows, tail=True)))) for name, owner in (
            ("report", history), ("surplus", prune))),
    ("scale-of-any-step-before", "scale_begins", wrap(
        loss_scale, "carry", lambda right, state, config, rows: right(
            state, config, [row | {"step": state.step} for row in rows]))),
    ("scale-that-fell-begins-anew", "scale_begins", wrap(
        loss_scale, "carry", lambda right, state, config, rows: right(state, config, []))),
]  # fmt: skip


# --- what is logged


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


def attention_of_keys(right: Callable, model: ModelConfig) -> int:
    left_out = model.d_queries - model.kv_heads * model.d_head
    return right(model) - 12 * model.n_layer * left_out * model.context


def attention_of_stream(right: Callable, model: ModelConfig) -> int:
    wider = model.d_queries - model.d_model
    return right(model) - 12 * model.n_layer * wider * model.context


def leave_out_biases(right: Callable, norms: Any, model: ModelConfig) -> Any:
    return right({n: x for n, x in norms.items() if not n.endswith("bias")}, model)


def count_steps_from_0(right: Callable, self: Loop, result: StepResult) -> None:
    self.first = 0
    right(self, result)


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


def change_set(change: Callable[..., Any]) -> Plant:
    """`change(right, file, tokenizer, rows)` is the corpus of a set of --eval-data."""
    return wrap(corpus, "load", lambda right, *given, **config: (
        change(right, *given) if given else right(**config)))  # fmt: skip


def count_all(right: Callable, *given: str) -> corpus.Corpus:
    data = right(*given)
    return replace(data, val=replace(data.val, counts=None))


def hold_out_nothing(right: Callable, *given: str) -> corpus.Corpus:
    data = right(*given)
    return replace(data, val=data.train)


def leave_out_flag(name: str) -> Plant:
    """The command for the other framework has one flag less."""

    def leave_out(right: Callable, config: Config) -> list[str]:
        pairs = itertools.pairwise(["", *right(config)])
        return [word for before, word in pairs if name not in (before, word)]

    return wrap(closing, "to_flags", leave_out)


def finish_by_log(right: Callable, run: Path, step: int, steps: int) -> str:
    return "finished" if step >= steps else right(run, step, steps)


def list_partial(right: Callable, run: Path) -> list[Path]:
    return [*right(run), *(Path(run, path.name[5:]) for path in run.glob("checkpoints/.tmp-*"))]


def name_last(kind: str) -> Plant:
    """Names the last tensor of a kind that is not finite, where several are."""

    def order(right: Callable, twin: Any, window: Batch) -> str:
        def turned(trace: BatchTrace) -> BatchTrace:
            return trace._replace(**{kind: dict(reversed(getattr(trace, kind).items()))})

        other: Any = SimpleNamespace(state=twin.state, trace=lambda b: turned(twin.trace(b)))
        return right(other, window)

    return wrap(nonfinite, "first_bad_tensor", order)


LOGGED: list[tuple[Any, ...]] = [
    ("tokens-per-second-of-a-micro-batch", "clock", change_rows_written(lambda loop, row: {
        "tokens_per_second": row["tokens_per_second"] / loop.config.optim.accum}), "late"),
    ("norms-tracked-as-numbers-of-a-step", "tracked_numbers", wrap(
        track, "finite_numbers", lambda right, row: right(row | {"kind": "train"}))),
    ("all-is-tracked-as-a-norm", "tracked_numbers", wrap(
        track, "finite_numbers", lambda right, row: right(row | {"kind": "norms"}))),
    ("tokens-of-one-device", "clock", change_rows_written(
        lambda loop, row: {"tokens": row["tokens"] // loop.config.mesh.size}), "late"),
    ("evaluation-counts-as-training-time", "clock",
     wrap(Loop, "report", report_from_last_report), "late"),
    ("a-save-counts-as-training-time", "clock",
     wrap(Loop, "report", report_from_last_evaluation), "synchronous"),
    ("mfu-of-one-device", "clock", change_rows_written(
        lambda loop, row: {"mfu": row["mfu"] * loop.config.mesh.size}), "late"),
    ("mfu-attention-of-keys", "flops", wrap(flops, "per_token", attention_of_keys), "grouped"),
    ("mfu-attention-of-the-stream", "flops", wrap(
        flops, "per_token", attention_of_stream), "wide-heads"),
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
    ("roofline-of-a-micro-batch", "plan_attention", wrap(
        roofline, "by_kind", lambda right, shape, how: right(shape, replace(how, accum=1))),
     "positions"),
    ("grad-norm-logged-scaled", "norm_under_a_scale",
     wrap(torch_ref.step.Trainer, "report", log_scaled_norm), "torch"),
    ("grad-norm-logged-scaled-jax", "norm_under_a_scale", change_metrics(
        grad_norm=lambda metrics: metrics.grad_norm * metrics.loss_scale), "jax"),
    ("grad-norm-logged-clipped", "norm_under_a_scale",
     wrap(torch_ref.step.Trainer, "clip", log_clipped_norm), "torch"),
    ("norms-of-modules-without-root", "norm_under_a_scale", wrap(
        params, "norms_by_module", lambda right, *given: {
            module: norm**2 for module, norm in right(*given).items()}), "torch"),
    ("norms-of-modules-without-bias", "norms_of_modules", wrap(
        params, "norms_by_module", leave_out_biases)),
    *((f"last-of-the-bad-{kind.replace('_', '-')}", "first_bad_tensor", name_last(kind))
      for kind in ("activations", "activation_grads", "grads")),
    ("only-the-first-micro-batch-is-looked-into", "first_bad_tensor", wrap(
        nonfinite, "first_bad_tensor", lambda right, twin, window: right(
            twin, window.select(slice(1))))),
    ("a-command-of-six-digits", "digits", wrap(closing, "to_flags", lambda right, config: right(
        Config.from_json(shorten(config.to_json()))))),
    ("a-record-of-six-digits", "digits", wrap(
        Config, "to_json", lambda right, self: shorten(right(self)))),
    ("set-of-packed-rows", "held_out_rows", change_set(
        lambda right, file, words, _: right(file, words)), "pad"),
    ("set-of-one-stream", "held_out_rows", change_set(
        lambda right, file, words, _: right(file, words, "stream")), "pack"),
    ("set-of-bytes", "held_out_rows", change_set(
        lambda right, file, _, rows: right(file, "", rows)), "stream"),
    ("set-without-mask", "held_out_rows", change_set(count_all), "pack"),
    ("export-of-packed-rows", "held_out_rows", put(
        onnx_export, "read_held_out", lambda config, data: batches.validation(config, data.val)),
     "pack"),
    ("set-of-what-trains", "held_out", change_set(hold_out_nothing)),
    ("command-without-quotes", "command", put(closing, "shlex", SimpleNamespace(join=" ".join)),
     "texts"),
    ("command-takes-all-devices", "command", leave_out_flag("--mesh"), "usual"),
    ("command-without-the-least-rate", "command", leave_out_flag("--min-lr"), "numbers"),
    ("command-of-one-process", "command", wrap(
        closing, "command", lambda right, module, config: right("", config).replace(
            "-m  ", f"-m {module} ")), "mesh"),
    ("command-in-the-start-s-context", "command", leave_out_flag("--context"), "init"),
    ("finished-by-its-log", "states", wrap(listing, "state_of", finish_by_log)),
    ("stopped-at-any-checkpoint", "states", wrap(
        listing, "state_of", lambda right, run, step, steps: right(run, 0, steps))),
    ("half-a-checkpoint-counts", "states", wrap(checkpoint, "listing", list_partial)),
    ("time-left-by-all-steps", "time_left", wrap(Loop, "report", count_steps_from_0)),
    ("peak-in-kilobytes", "peak", wrap(memory, "resident_peak", lambda right: right() // 1024)),
    ("peak-is-what-is-held-jax", "peak_of_a_device", put(
        jax_impl.twin.JaxTwin, "peak_bytes",
        lambda self: self.device.memory_stats()["bytes_in_use"]), "jax"),
    ("peak-is-what-is-held", "peak_of_a_device", put(
        torch_ref.twin.TorchTwin, "peak_bytes",
        lambda self: torch.accelerator.memory_allocated()), "torch"),
    ("peak-is-what-is-reserved", "peak_of_a_device", put(
        torch_ref.twin.TorchTwin, "peak_bytes",
        lambda self: torch.accelerator.max_memory_reserved()), "torch"),
    ("peak-is-the-host-s", "peak_of_a_device", put(
        jax_impl.twin.JaxTwin, "peak_bytes", lambda self: memory.resident_peak()), "jax"),
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


def widen_model(right: Callable, self: Any) -> Any:
    """The evaluation's model has the weights of training, not rounded to its own dtype."""
    model, roles = right(self)
    model.float().load_state_dict(self.whole_state())
    return model, roles


def evaluate_rounded(right: Callable, self: Any, window: Batch) -> float:
    return float(np.float32(right(self, window)).astype(jnp.bfloat16))


def drop_out_always(right: Callable, self: Any, batch: Batch, dropout: Any = None) -> Any:
    drawn = Dropout(self.config.dropout, seed=0, step=0, micro_step=0, strict=True)
    return right(self, batch, dropout or drawn)


@torch.no_grad()
def torch_logits_in_training_policy(self: Any, batch: Batch) -> Any:
    with torch_ref.step.autocast(self.roles, self.device):
        return self.model(batch)


def logits(self: Any, state: Any, batch: Batch) -> Any:
    """Computes JAX's logits in the policy that trains."""
    return jax_impl.step.Trainer.evaluation_model(self, state)(batch)


def evaluate(self: Any, state: Any, batches: Batch) -> Any:
    """Evaluates in JAX by the model that trains."""
    model = jax_impl.step.Trainer.evaluation_model(self, state)
    return jax.lax.map(partial(self.batch_loss, model), batches).mean()


def in_training_s_roles(
    right: Callable, self: Any, model: Any, batch: Batch, roles: Any, *rest: Any
) -> Any:
    return right(self, model, batch, self.roles, *rest)


def take_turns(right: Callable, function: Callable, *qkv: Any, same_BTT: Any) -> Any:
    """Neighbouring heads of queries get other keys: torch's `repeat` for `repeat_interleave`."""
    q, k, v = qkv
    wide = (x.repeat(1, 1, q.shape[2] // x.shape[2], 1) for x in (k, v))
    return right(function, q, *wide, same_BTT=same_BTT)


def divide_by_all(right: Callable, losses: Any, counts: Any, over: Any) -> Any:
    return right(losses, counts, None if over is None else over * 0 + losses.shape[0])


def change_sampling(**changes: Callable[[Any], Any]) -> Plant:
    return wrap(sampling, "sample", lambda right, twin, prompt, **how: right(
        twin, prompt, **how | {name: change(how[name]) for name, change in changes.items()}
    ))  # fmt: skip


def change_choice(change: Callable[[float, int, Any], tuple[float, int, Any]]) -> Plant:
    """A token is drawn by another temperature, top_k or generator."""
    return wrap(sampling, "choose", lambda right, scores, *how: right(scores, *change(*how)))


def change_sampled(**changed: Any) -> Plant:
    """`lockstep sample` asks for another text."""
    how = SimpleNamespace(**vars(sampling))
    how.sample = lambda *given, **rest: sampling.sample(*given, **rest | changed)
    return put(sample_command, "sampling", how)


def forget_flag(name: str, value: Any) -> Plant:
    """`lockstep sample` goes by another value of a flag than it is given."""
    return wrap(sample_command, "_sample", lambda right, given: right(
        SimpleNamespace(**vars(given) | {name: value})))  # fmt: skip


def judge_by_training_alone(right: Callable, self: Loop) -> None:
    config = self.config
    self.config = config.replace(eval_policy="")
    try:
        right(self)
    finally:
        self.config = config


def go_on(right: Callable, self: Loop) -> None:
    with suppress(Diverged):
        right(self)


TRAINER = torch_ref.step.Trainer, jax_impl.step.Trainer
EVALUATION: list[tuple[Any, ...]] = [
    ("stale-evaluation-weights", "evaluation_follows", wrap(
        torch_ref.extra.evaluation.OtherPolicy, "evaluation_model", evaluate_first_model), "torch"),
    ("stale-evaluation-weights-jax", "evaluation_follows", wrap(
        jax_impl.step.Trainer, "evaluate", evaluate_first_state), "jax"),
    ("evaluation-drops-out", "evaluation_follows", wrap(
        torch_ref.model.GPT, "hidden", drop_out_always), "torch"),
    ("evaluation-mean-in-compute-jax", "loss", wrap(
        jax_impl.twin.JaxTwin, "evaluate", evaluate_rounded), "jax", "bf16"),
    ("evaluation-of-the-first-batch", "loss", wrap(
        TRAINER[0], "evaluate", lambda right, self, window: right(
            self, window.select(slice(1)))), "torch", "bf16"),
    ("token-0-is-ignored", "loss", put(torch_ref.loss, "F", SimpleNamespace(
        cross_entropy=partial(F.cross_entropy, ignore_index=0))), "torch", "bf16"),
    ("masked-loss-over-all", "loss", wrap(torch_ref.loss, "average", divide_by_all),
     "torch", "fp64", "masked"),
    ("grouped-queries-take-turns", "grouped_queries", wrap(
        torch_ref.extra.attention, "sdpa", take_turns), "torch"),
    ("grouped-queries-take-turns-in-blocks", "grouped_queries", wrap(
        jax_impl.extra.attention.model, "repeat_heads", lambda right, x, heads: jnp.tile(
            x, (1, 1, heads // x.shape[2], 1))), "jax"),
    ("sampled-under-training-policy", "scores_in_the_evaluation_s_policy", put(
        TRAINER[0], "logits", torch_logits_in_training_policy), "torch", "fp32"),
    ("sampled-under-training-policy-jax", "scores_in_the_evaluation_s_policy", put(
        TRAINER[1], "logits", jit_method(logits)), "jax", "fp32"),
    ("evaluated-with-weights-of-training-jax", "scores_in_the_evaluation_s_policy", put(
        jax_impl.extra.evaluation.OtherPolicy, "evaluation_model",
        lambda self, state: self.eval_model(state.params)), "jax", "bf16-weights"),
    ("evaluated-with-weights-of-training", "scores_in_the_evaluation_s_policy", wrap(
        torch_ref.extra.evaluation.OtherPolicy, "evaluation_model", widen_model),
     "torch", "bf16-weights"),
    ("float64-s-scores-in-float32", "scores_in_the_evaluation_s_policy", wrap(
        jax_impl.twin.JaxTwin, "logits", lambda right, self, tokens: right(self, tokens).astype(
            np.float32 if self.config.precision.eval_policy else float)), "jax", "fp64"),
    ("evaluated-under-training-s-autocast", "scores_in_the_evaluation_s_policy", wrap(
        torch_ref.extra.evaluation.OtherPolicy, "evaluation_model",
        lambda right, self: (right(self)[0], self.roles)), "torch", "fp32"),
    ("chunks-are-evaluated-as-in-training", "loss_in_the_evaluation_s_policy", wrap(
        torch_ref.extra.chunks.InChunks, "batch_loss", in_training_s_roles), "torch", "3"),
    ("loss-evaluated-as-in-training", "loss_in_the_evaluation_s_policy", wrap(
        TRAINER[0], "batch_loss", in_training_s_roles), "torch", "1"),
    ("chunks-are-evaluated-by-training-s-model", "loss_in_the_evaluation_s_policy", put(
        TRAINER[1], "evaluate", jit_method(evaluate)), "jax", "3"),
    ("evaluated-by-training-s-model", "loss_in_the_evaluation_s_policy", put(
        TRAINER[1], "evaluate", jit_method(evaluate)), "jax", "1"),
    ("evaluation-policy-forgotten", "scores_in_the_evaluation_s_policy", put(
        Config, "eval_dtypes", property(lambda self: self.dtypes)), "jax", "bf16-weights"),
    ("sample-forgets-the-policy", "the_command", wrap(
        sample_command.directory, "read_record", lambda right, run: replace(
            right(run), config=right(run).config.replace(eval_policy="")))),
    ("sample-of-the-first-checkpoint", "the_command", wrap(
        sample_command.trainer, "restore", lambda right, *given, step: right(*given, step=0))),
    ("sample-of-all-the-vocabulary", "the_command", change_sampled(vocab=300)),
    ("sample-forgets-the-temperature", "the_command", change_sampled(temperature=0.8)),
    ("sample-forgets-the-seed", "the_command", change_sampled(seed=0)),
    ("sample-forgets-the-framework", "who_samples", forget_flag("framework", "")),
    ("sample-forgets-the-device", "who_samples", forget_flag("device", "auto")),
    ("sample-forgets-the-step", "who_samples", forget_flag("step", None)),
    ("sample-of-the-run-s-mesh", "who_samples", wrap(
        Config, "replace", lambda right, self, **fields: right(
            self, **fields | {"mesh": str(self.mesh) if "device" in fields else "data=1"}))),
    ("float16-evaluation-ends-the-run", "overflow", wrap(
        Loop, "evaluate", judge_by_training_alone), "bf16", "fp16", "DONE"),
    ("lost-loss-ends-no-run", "overflow", wrap(Loop, "evaluate", go_on),
     "bf16", "bf16", "DIVERGED"),
    ("sample-context-one-short", "context", change_sampling(context=lambda context: context - 1)),
    ("sample-context-beyond", "context", change_sampling(context=lambda context: context + 1)),
    ("temperature-multiplies", "distribution", change_choice(
        lambda t, k, draws: (1 / t, k, draws))),
    ("top-k-one-more", "distribution", change_choice(
        lambda t, k, draws: (t, k + (k > 0), draws))),
    ("top-k-of-all-is-256", "large_vocabulary", change_choice(
        lambda t, k, draws: (t, k or 256, draws))),
    ("top-k-at-most-256", "large_vocabulary", change_choice(
        lambda t, k, draws: (t, min(k, 256), draws))),
    ("likeliest-of-the-first-256", "large_vocabulary", wrap(
        sampling, "choose", lambda right, scores, t, *how: right(
            scores if t else scores[:256], t, *how))),
    ("same-draw-for-each-token", "draws_are_independent", change_choice(
        lambda t, k, draws: (t, k, np.random.default_rng(0)))),
]  # fmt: skip


# --- exports


def unmerged(right: Callable, files: list[Path], model: ModelConfig) -> Any:
    """Weights whose adapters nobody adds."""
    weights = right(files, model)
    return SimpleNamespace(
        model=model, dtype=weights.dtype, read=weights.read,
        merged=lambda name, dtype: weights.read(name).astype(dtype),
    )  # fmt: skip


def change_zero_points(right: Callable, file: Path, windows: Iterator[np.ndarray]) -> None:
    right(file, windows)
    graph = onnx.load(file)
    for each in graph.graph.initializer:
        if each.name.endswith("_zero_point") and each.data_type == onnx.TensorProto.UINT8:
            off = numpy_helper.to_array(each) + np.uint8(1)
            each.CopyFrom(numpy_helper.from_array(off, each.name))
    onnx.save(graph, file)


def calibrate_on_held_out(config: Config, train: Any) -> Iterator[np.ndarray]:
    yield from batches.validation(config, train).tokens.astype(np.int64)


def with_plain_eps(right: Callable, model: ModelConfig, *rest: Any) -> Any:
    return right(replace(model, norm_eps=1e-5), *rest)


def change_json(owner: Any, name: str, file: str, **changes: Callable[[Any], Any]) -> Plant:
    """Makes the writer of a folder leave other fields in a JSON file of it."""

    def write(right: Callable, folder: Path, *rest: Any) -> None:
        right(folder, *rest)
        content = json.loads((folder / file).read_text())
        other = {name: change(content[name]) for name, change in changes.items()}
        (folder / file).write_text(json.dumps(content | other))

    return wrap(owner, name, write)


def leave_out_file(*names: str) -> Plant:
    kept = {kind: tuple(n for n in getattr(about, kind) if n not in names)
            for kind in ("MODEL", "TOKENIZER")}  # fmt: skip
    return several(*(put(about, kind, left) for kind, left in kept.items()))


def prefer_start(right: Callable, run: Path, model: ModelConfig, content: dict[str, Any]) -> Any:
    """Prefers what the run began from to what the run says."""
    start = json.loads((run / about.FOLDER / about.CONFIG).read_text())
    return right(run, model, content) | start


EXPORTS: list[tuple[Any, ...]] = [
    ("onnx-without-adapters", "export", wrap(forward, "open_weights", unmerged),
     "onnx", "llama-lora"),
    ("stablehlo-without-adapters", "export", wrap(forward, "open_weights", unmerged),
     "stablehlo", "llama-lora"),
    ("exported-at-another-step", "export", wrap(forward, "files_of", lambda right, run, step,
     warn: right(run, None, warn)), "onnx", "gpt2"),
    ("adapters-merged-unscaled", "export", put(ModelConfig, "lora_scale", 1.0),
     "safetensors", "gpt2-lora"),
    ("onnx-layernorm-eps-by-default", "export", wrap(forward, "forward_config", with_plain_eps),
     "onnx", "gpt2"),
    ("onnx-rmsnorm-eps-by-default", "export", wrap(forward, "forward_config", with_plain_eps),
     "onnx", "qwen3"),
    ("stablehlo-eps-by-default", "export", wrap(forward, "forward_config", with_plain_eps),
     "stablehlo", "gpt2"),
    ("config-eps-by-default", "export", wrap(export.huggingface, "config_json", with_plain_eps),
     "safetensors", "qwen3"),
    ("onnx-last-place-as-the-one-before", "export", wrap(
        onnx_export, "exported", lambda right, run, to, _, **rest: right(
            run, to, "parity_tests.oracles.wrong_onnx", **rest)), "onnx", "qwen3"),
    ("int8-calibrated-on-one-window", "int8", wrap(onnx_export, "calibration", lambda right, *given:
     itertools.islice(right(*given), 1))),
    ("int8-calibrated-on-held-out", "int8", put(onnx_export, "calibration", calibrate_on_held_out)),
    ("int8-zero-points-off", "int8", wrap(onnx_export, "quantize", change_zero_points)),
    ("peft-alpha-whole", "adapters", change_json(
        export, "write_adapters", adapters.CONFIG, lora_alpha=int), "gpt2-lora"),
    ("peft-alpha-over-rank", "adapters", change_json(
        export, "write_adapters", adapters.CONFIG, lora_alpha=lambda alpha: alpha / 3),
     "llama-lora"),
    ("peft-adapters-of-another-step", "adapters", wrap(
        export, "files_of", lambda right, run, step, warn: right(run, None, warn)), "gpt2-lora"),
    ("index-counts-float32", "index", change_json(
        export, "_write_weights", INDEX, metadata=lambda about: {
            "total_size": 2 * about["total_size"]}), "bfloat16"),
    ("index-of-the-next-file", "index", change_json(
        export, "_write_weights", INDEX, weight_map=lambda files: dict(
            zip(files, [*files.values()][1:] + [*files.values()][:1]))), "float32"),
    ("files-below-the-largest-size", "index", wrap(
        export, "_divide", lambda right, sizes, dtype, most: right(sizes, dtype, most - 1)),
     "float32"),
    ("files-as-large-as-in-float32", "index", wrap(
        export, "_divide", lambda right, sizes, dtype, most: right(sizes, "float32", most)),
     "bfloat16"),
    ("config-is-the-start-s", "shorter_context", wrap(export, "_merged", prefer_start), "gpt2"),
    ("config-forgets-the-start", "shorter_context", put(
        export, "_merged", lambda run, model, content: content), "gpt2"),
    ("dtype-is-the-start-s", "shorter_context", put(export, "RENAMED", ()), "gpt2"),
    ("rope-is-cut-at-the-context", "shorter_context", wrap(
        export, "_merged", lambda right, run, model, content: right(run, model, content) | {
            "max_position_embeddings": model.context}), "llama3"),
    ("rope-of-six-digits", "numbers", put(Rope, "__str__", lambda self: ",".join(
        f"{name}={x:g}" for name, x in self._asdict().items())), "llama"),
    ("rope-read-of-six-digits", "numbers", wrap(huggingface, "parse_rope", lambda right, text: Rope(
        *map(shorten, right(text)))), "qwen2"),
    ("epsilon-of-six-digits", "numbers", wrap(
        huggingface, "fields_of", lambda right, *given: shorten(right(*given))), "gpt2"),
    ("config-of-six-digits", "numbers", wrap(
        huggingface, "config_json", lambda right, *given: shorten(right(*given))), "qwen2"),
    ("export-without-template", "files_beside", leave_out_file("chat_template.jinja")),
    ("export-without-generation", "files_beside", leave_out_file("generation_config.json")),
    ("export-without-special-tokens", "files_beside", leave_out_file("tokenizer_config.json")),
    ("stated-loss-of-prompts", "masked_loss", wrap(
        onnx_export, "mean_loss", lambda right, logits, window: right(
            logits, window._replace(counts=None)))),
    ("int8-loss-of-float32", "int8", wrap(onnx_export, "Exported", lambda right, size, loss, *was:
     right(size, was[1], *was))),
]  # fmt: skip

# --- narrow formats


def change_draws(change: Callable[[Any, Any], Any]) -> Plant:
    """`change(x, draws)` is what a gradient is rounded by, in both twins."""
    return wrap(rounding.NeutralRounding, "quantize", lambda right, self, x, to, axis, draws=None,
                scale=None: right(self, x, to, axis, change(x, draws), scale))  # fmt: skip


def keep_scales(of: Callable[[int], bool]) -> Plant:
    """A process goes by its own rows where it has so many scales."""
    return wrap(torch_ref.extra.formats.rounding.Rounding, "over_processes", lambda right, self, x:
                x if of(x.numel()) else right(self, x))  # fmt: skip


def scale_by_own_loss(right: Callable, self: Any, *given: Any) -> None:
    processes, self.processes = self.processes, 1
    right(self, *given)
    self.processes = processes


DELAYED = torch_ref.extra.formats.delayed.Delayed
DROPOUTS = torch_ref.dropout.Dropout, jax_impl.dropout.Dropout


def change_keys(change: Callable[[int, str], tuple[int, str]]) -> Plant:
    """In both twins, which share the rule."""
    return several(*(wrap(owner, "key_of", lambda right, self, layer, site: right(
        self, *change(layer, site))) for owner in DROPOUTS))  # fmt: skip


NARROW: list[tuple[Any, ...]] = [
    ("float64-is-rounded-to-nearest", "stochastic", change_draws(
        lambda x, draws: None if str(x.dtype).endswith("64") else draws), "torch", "float64"),
    ("gradients-are-rounded-to-nearest", "stochastic", change_draws(
        lambda x, draws: None), "jax", "float32"),
    ("micro-batches-round-alike", "draws_of_a_product", several(*(wrap(
        owner, "dropout", lambda right, *given: right(*given[:-1], 0)) for owner in TRAINER)),
     "torch"),
    ("layers-round-alike", "draws_of_a_product", change_keys(lambda layer, site: (0, site)), "jax"),
    ("gate-rounds-as-up", "draws_of_a_product", change_keys(
        lambda layer, site: (layer, "up" if site == "gate" else site)), "torch"),
    ("seed-reaches-no-rounding", "draws_of_a_product", several(*(wrap(
        owner, "__init__", lambda right, *given, seed, **rest: right(*given, seed=0, **rest))
        for owner in DROPOUTS)), "jax"),
    ("amaxes-of-the-scaled-loss", "history", several(
        put(torch_ref.extra.formats.rounding.Rounding, "units", lambda *given: torch.ones(3)),
        put(jax_impl.extra.formats.rounding.Rounding, "units", lambda *given: jnp.ones(3))),
     "jax"),
    ("history-of-one-step", "history", wrap(
        rounding.NeutralRounding, "record", lambda right, self, history, *given: right(
            self, history * 0, *given)), "torch"),
    ("history-never-forgets", "history", wrap(
        rounding.NeutralRounding, "record", lambda right, self, history, *given: right(
            self, history * 0 + self.amax(history, 1), *given)), "jax"),
    ("draws-up-to-a-half", "stochastic", change_draws(
        lambda x, draws: None if draws is None else draws / 2), "torch", "float32"),
    ("rows-scaled-by-own-rows", "scales_of_all_rows", keep_scales(lambda n: n > 1), "fp8-rowwise"),
    ("tensor-scaled-by-own-rows", "scales_of_all_rows", keep_scales(lambda n: n == 1), "fp8"),
    ("amaxes-of-own-loss", "histories_of_processes", wrap(
        DELAYED, "update_amaxes", lambda right, self, found, scale, **how: right(
            self, found, scale / self.processes, **how))),
    ("scales-of-own-loss", "histories_of_processes", wrap(
        DELAYED, "give_scales", scale_by_own_loss)),
    ("amaxes-of-skipped-steps", "histories_of_processes", wrap(
        DELAYED, "update_amaxes", lambda right, *given, skipped: right(*given, skipped=False))),
]  # fmt: skip

# --- several devices


class RowsOfTheFirst(torch_ref.extra.mesh.mesh.OwnRowsDropout):
    """Every device draws the mask of the first one's rows."""

    draw = Dropout.draw


def change_place(change: Callable[[Any, Any], tuple[int, int, int]]) -> Plant:
    """`change(tensor, mesh)` is where a device's part begins, and who writes it."""
    return put(torch_ref.extra.mesh.mesh, "place", change)


def change_shards(copies: Callable[[int], int], turn: Callable[[int], int]) -> Plant:
    """JAX counts other copies of a part."""

    def pieces(right: Callable, tensors: Any, config: ModelConfig) -> Any:
        told = {}
        for name, array in tensors.items():
            shards = [SimpleNamespace(**vars(s) | {"replica_id": turn(s.replica_id)})
                      for s in array.addressable_shards]  # fmt: skip
            devices = range(copies(len(array.sharding.device_set)))
            told[name] = SimpleNamespace(size=array.size, addressable_shards=shards,
                                         sharding=SimpleNamespace(device_set=devices))  # fmt: skip
        return right(told, config)

    return wrap(jax_impl.io.bridge, "pieces", pieces)


def seed_by(axis: str) -> Plant:
    """Fast numerics draw by a device's place on one axis."""

    def dropout(right: Callable, self: Any, micro_step: int) -> Dropout:
        with pytest.MonkeyPatch.context() as patch:
            rank = self.mesh[axis].get_local_rank
            patch.setattr(torch_ref.extra.mesh.mesh, "rank", rank)
            return right(self, micro_step)

    return wrap(torch_ref.extra.mesh.mesh.OnMesh, "dropout", dropout)


MESH: list[tuple[Any, ...]] = [
    ("parts-of-a-model-draw-alike", "masks", seed_by("data"), "fast"),
    ("copies-of-a-model-draw-alike", "masks", seed_by("fsdp"), "fast"),
    ("turns-of-twice-the-copies", "pieces", change_shards(lambda n: 2 * n, lambda copy: copy)),
    ("every-copy-is-written", "pieces", change_shards(lambda n: n, lambda copy: 0)),
    ("the-last-copy-is-not-counted", "pieces", change_shards(
        lambda n: 4 if n == 6 else n, lambda copy: copy)),
    ("the-first-copy-alone-writes", "pieces", wrap(
        jax_impl.io.bridge, "pieces", lambda right, tensors, config: {
            name: x for one in tensors for name, x in right({one: tensors[one]}, config).items()
        })),
    ("parts-begin-by-whole-quotients", "places", change_place(lambda tensor, mesh: (
        len(tensor) // mesh["fsdp"].size() * mesh["fsdp"].get_local_rank(),
        mesh["data"].get_local_rank(), mesh["data"].size()))),
    ("parts-as-even-as-can-be", "places", change_place(lambda tensor, mesh: (
        len(tensor) * mesh["fsdp"].get_local_rank() // mesh["fsdp"].size(),
        mesh["data"].get_local_rank(), mesh["data"].size()))),
    ("parts-of-all-devices", "places", change_place(lambda tensor, mesh: (
        -(-len(tensor) // (mesh["data"].size() * mesh["fsdp"].size()))
        * mesh["fsdp"].get_local_rank(), mesh["data"].get_local_rank(), mesh["data"].size()))),
    ("a-part-is-written-by-all", "places", change_place(lambda tensor, mesh: (
        -(-len(tensor) // mesh["fsdp"].size()) * mesh["fsdp"].get_local_rank(), 0,
        mesh["data"].size()))),
    ("devices-draw-alike", "masks", put(
        torch_ref.extra.mesh.mesh, "seed_torch", lambda key: None), "fast"),
    ("devices-draw-the-first-rows", "masks", put(
        torch_ref.extra.mesh.mesh, "OwnRowsDropout", RowsOfTheFirst), "strict"),
    ("devices-count-alone", "mean_count", put(
        torch_ref.extra.mesh.mesh.OnMesh, "mean_count", torch_ref.step.Trainer.mean_count)),
    ("a-device-without-targets-counts-one", "mean_count", put(
        torch_ref.extra.mesh.mesh.OnMesh, "mean_count", lambda self, window: (
            torch_ref.extra.mesh.mesh.mean(torch_ref.loss.share_count(
                torch_ref.loss.count_targets(window), window), self.mesh)))),
    ("devices-draw-other-rows", "whole_mask", wrap(
        torch_ref.extra.mesh.mesh, "bernoulli", lambda right, *given: right(
            *given[:-1], given[-1] + 1))),
]  # fmt: skip

# --- dropout, wrong in both twins alike


def change_dropout(wrong: Callable) -> Plant:
    """`wrong(right, dropout, x, layer, site)` is what dropout makes of x."""
    owners = jax_impl.dropout.Dropout, torch_ref.dropout.Dropout
    return several(*(wrap(owner, "__call__", wrong) for owner in owners))


DROPOUT: list[tuple[Any, ...]] = [
    ("embedding-is-not-dropped", "dropout", change_dropout(
        lambda right, self, x, layer, site: x if layer == -1 else right(self, x, layer, site)),
     "torch"),
    ("kept-are-not-scaled", "dropout", change_dropout(
        lambda right, self, *given: right(self, *given) * (1 - self.rate)), "jax"),
    ("mlp-drops-as-attention", "dropout", change_dropout(
        lambda right, self, x, layer, site: right(
            self, x, layer, "attention" if site == "mlp" else site)), "torch"),
    ("layers-drop-alike", "dropout", change_dropout(
        lambda right, self, x, layer, site: right(self, x, min(layer, 0), site)), "jax"),
    ("micro-batches-drop-alike", "dropout", several(*(wrap(
        owner, "dropout", lambda right, *given: right(*given[:-1], 0)) for owner in TRAINER)),
     "jax"),
]  # fmt: skip

# --- attention


def change_kernel(**changed: Any) -> Plant:
    """cuDNN's kernel gets other arguments."""

    def run(right: Callable, q: Any, k: Any, v: Any, mask: Any = None, **how: Any) -> Any:
        given = {"q": q, "k": k, "v": v, "mask": mask, **how}
        given |= {name: change(given) for name, change in changed.items()}
        return right(**given)

    return wrap(jax_impl.extra.attention, "scaled_dot_product_attention", run)


ATTENTION: list[tuple[Any, ...]] = [
    ("cudnn-sees-other-documents", "attention", change_kernel(mask=lambda given: None),
     "jax", "cudnn", "packed"),
    ("cudnn-sees-what-comes", "attention", change_kernel(is_causal=lambda given: False),
     "jax", "cudnn", "plain"),
    ("cudnn-scales-twice", "attention", change_kernel(
        q=lambda given: given["q"] * given["q"].shape[-1] ** -0.5), "jax", "cudnn", "plain"),
    ("cudnn-s-heads-take-turns", "attention", change_kernel(
        q=lambda given: given["q"][:, :, ::-1]), "jax", "cudnn", "packed"),
    ("flash-heads-take-turns", "attention", put(
        jax_impl.extra.attention, "repeat_heads", lambda x, heads: jnp.tile(
            x, (1, 1, heads // x.shape[2], 1))), "jax", "flash", "plain"),
    ("flash-scales-by-all-heads", "attention", wrap(
        jax_impl.extra.attention, "flash_attention", lambda right, q, k, v, **how: right(
            q * q.shape[2] ** -0.5, k, v, **how)), "jax", "flash", "plain"),
]  # fmt: skip

# --- the judge


def gap_of(order: float) -> Plant:
    """A gap is of one norm alone."""

    def gap(right: Callable, a: np.ndarray, b: np.ndarray) -> float:
        found = right(a, b)
        size = np.linalg.norm(b, order)
        return float(np.linalg.norm(a - b, order) / size) if 0 < found < np.inf else found

    return wrap(compare, "norm_gap", gap)


def disturb_matrices(right: Callable, weights: Any, generator: Any) -> Any:
    moved = right(weights, generator)
    return {name: moved[name] if x.ndim > 1 else x for name, x in weights.items()}


def change_spots(choose: Callable[[list[Spot]], Spot]) -> Plant:
    """One difference stands for all of a place."""

    def judge(right: Callable, root: Root, name: str, accepted: Any) -> bool:
        here = [spot for spot in root.spots if name in (spot.where, spot.detail)] or root.spots
        return right(replace(root, spots=[choose(here)]), name, accepted)

    return wrap(accept, "_is_place_accepted", judge)


def first_row_beyond(self: Any, nats: float) -> int | None:
    beyond = np.flatnonzero(~(self.gap <= nats))
    return int(beyond[0]) + 1 if len(beyond) else None


JUDGE: list[tuple[Any, ...]] = [
    ("gap-of-the-squares-alone", "norm_gap", gap_of(2)),
    ("gap-of-the-largest-alone", "norm_gap", gap_of(np.inf)),
    ("gap-relative-to-ours", "norm_gap", wrap(
        compare, "norm_gap", lambda right, a, b: right(b, a))),
    ("gap-of-what-is-no-number-is-none", "norm_gap", wrap(
        compare, "norm_gap", lambda right, a, b: right(np.nan_to_num(a), b))),
    ("starts-are-not-disturbed", "starts", put(
        case, "disturb", lambda weights, generator: weights)),
    ("gains-of-a-start-are-one", "starts", wrap(case, "disturb", disturb_matrices)),
    ("all-starts-are-one", "starts", wrap(case, "disturb", lambda right, weights, _: right(
        weights, np.random.default_rng(0)))),
    ("accepted-by-the-smallest", "accepted", change_spots(
        lambda spots: min(spots, key=lambda spot: spot.figure))),
    ("accepted-by-the-first", "accepted", change_spots(lambda spots: spots[0])),
    ("accepted-by-the-last", "accepted", change_spots(lambda spots: spots[-1])),
    ("one-place-accepts-all", "accepted", put(accept, "is_accepted", lambda root, accepted: any(
        accept._is_place_accepted(root, name, accepted) for name in root.names))),
    ("one-cause-accepts-all", "accepted", wrap(
        accept.Accepted, "causes", lambda right, self, root: right(self, root) and {
            *root.cause.split("; ")})),
    ("parted-at-a-row", "parting", put(history.Parting, "first_beyond", first_row_beyond)),
]  # fmt: skip

# --- remat


def count_in_segments(right: Callable, layer: Callable, blocks: list[Any], x: Any, *, remat: str
                      ) -> Any:  # fmt: skip
    """The layers of each segment are counted from 0."""
    size = len(segments(len(blocks))[0]) if remat == "sqrt" else len(blocks)
    return right(lambda block, i, x: layer(block, i % size, x), blocks, x, remat=remat)


REMAT: list[tuple[Any, ...]] = [
    ("segments-count-from-0", "segments", wrap(
        torch_ref.model, "through_blocks", count_in_segments), "torch", "unroll"),
    ("segments-count-from-0-jax", "segments", wrap(
        jax_impl.model, "through_blocks", count_in_segments), "jax", "unroll"),
    ("segments-count-segments", "segments", wrap(
        jax_impl.extra.scan, "scan_segments", lambda right, segment, *given: right(
            lambda params, i, x: segment(params, i // 2, x), *given)), "jax", "scan"),
]  # fmt: skip

KINDS = {"data": DATA, "initial": INITIAL, "schedule": SCHEDULE, "logged": LOGGED,
         "evaluation": EVALUATION, "exports": EXPORTS, "formats": NARROW, "mesh": MESH,
         "dropout": DROPOUT, "attention": ATTENTION, "judge": JUDGE, "remat": REMAT}  # fmt: skip
BUGS = [
    Bug(name, kind, f"check_{check}", plant, tuple(given))
    for kind, bugs in KINDS.items()
    for name, check, plant, *given in bugs
]
