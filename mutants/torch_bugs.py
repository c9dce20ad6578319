"""Mutants of the PyTorch twin: small, named, each a mistake somebody has made.

`lockstep.parity.catalogue` says what each is and which rung must catch it.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch._inductor.config  # strict numerics import it: once, and not in each fork
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call
from torch.nn.utils.stateless import _reparametrize_module

from lockstep.config import chunks as in_chunks
from lockstep.config import policy
from lockstep.config.policy import Roles
from lockstep.data.batch import Batch
from lockstep.model import rotary
from lockstep.twin import StepResult
from mutants import module_formats, torch_formats, torch_step, torch_world
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
from torch_ref import dropout, loss, model, optim, precision, step, twin
from torch_ref.dropout import Dropout
from torch_ref.extra import chunks, rules
from torch_ref.extra.evaluation import OtherPolicy
from torch_ref.extra.formats.products import RoundedProduct
from torch_ref.extra.lora import LoRALinear
from torch_ref.extra.mesh.processes import process_count
from torch_ref.extra.packed import Segments
from torch_ref.io import bridge

# --- the model


def run_in_bfloat16(right: Callable, self: Any, x: Tensor, *rest: Any) -> Tensor:
    return right(self, x.bfloat16(), *rest).to(x.dtype)


def attend_with(change: Callable) -> Plant:
    """The written-out attention of changed queries, keys and values."""
    return wrap(model, "attend", lambda right, q, k, v, places, *, dtype, matmul, **size: right(
        *change(q, k, v, **size), places, dtype=dtype, matmul=matmul))  # fmt: skip


def forget_of_places(change: Callable[[Segments], Segments]) -> Plant:
    """Drops some of what is known of a batch's segments."""
    return wrap(Segments, "of", lambda right, segments: change(right(segments)))


def with_rope(**changed: float) -> Plant:
    return wrap(rotary, "table", lambda right, t, k, rope: right(t, k, rope._replace(**changed)))


def with_norm_eps(eps: float) -> Plant:
    """Gives all norms this epsilon."""

    def wrong(
        right: Callable, self: Any, config: Any, parts: Any, size: float = eps, **rest: str
    ) -> None:
        parts.config = replace(config, norm_eps=size)
        right(self, parts.config, parts, **rest)

    return wrap(model.GPT, "__init__", wrong)


# --- precision


def cast_whole_tree(right: Callable, gpt: Any, batch: Batch, roles: Roles, *rest: Any) -> Tensor:
    kind = precision.dtype(roles.compute)
    weights = {name: p.to(kind) for name, p in gpt.named_parameters()}
    return right(lambda *args: functional_call(gpt, weights, args), batch, roles, *rest)


def round_forward(ending: str) -> Plant:
    """Rounds parameters to bfloat16 in the forward pass; their gradients stay as they are."""

    def wrong(right: Callable, gpt: Any, *rest: Any) -> Tensor:
        chosen = {name: p for name, p in gpt.named_parameters() if name.endswith(ending)}
        rounded = {name: p + (p.bfloat16().float() - p).detach() for name, p in chosen.items()}
        with _reparametrize_module(gpt, rounded):
            return right(gpt, *rest)

    return wrap(model.GPT, "hidden", wrong)


def multiply_back_in_float32(context: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    a, b, *_ = context.saved_tensors
    dbias = dy.sum(0) if context.needs_input_grad[3] else None
    return None, dy @ b.mT, a.mT @ dy, dbias, None, None, None


def products_of_gradients(kind: Callable[[str], str]) -> Plant:
    """Gradients have another dtype than the one that is asked for."""
    makers = ("linear_backward_in", "matmul_backward_in")
    return both(*(wrap(rules, name, lambda right, asked: right(kind(asked))) for name in makers))


# --- loss, data, evaluation


def split_rows(x: Tensor, batch: Batch, chunks: int) -> list[tuple[Tensor, Batch]]:
    rows = in_chunks.size(len(x), chunks)
    targets = batch.targets.flatten().split(rows)
    return [(each, batch._replace(targets=own)) for each, own in zip(x.split(rows), targets)]


def mean_of_chunks(
    right: Callable, gpt: Any, x: Tensor, batch: Batch, roles: Roles, chunks: int, *_: None
) -> Tensor:
    means = [right(gpt, *each, roles, 1) for each in split_rows(x, batch, chunks)]
    return torch.stack(means).mean()


def cast_the_head_once(
    right: Callable, net: model.GPT, x_RD: Tensor, batch: Batch, roles: Roles, *rest: Any
) -> Tensor:
    """Casts the table once: the gradients of all chunks are added up in the cast's dtype."""
    table = net.embed.weight.to(precision.dtype(roles.compute))
    cast = SimpleNamespace(logits=lambda x_RD: net.head(x_RD, table))
    return right(cast, x_RD, batch, roles, *rest)


def head_of_one_chunk(
    right: Callable, gpt: Any, x: Tensor, batch: Batch, roles: Roles, chunks: int, *_: None
) -> Tensor:
    """The tied weight is a constant to all chunks but the first."""
    fixed = SimpleNamespace(logits=lambda x: F.linear(x, gpt.embed.weight.detach()))
    models = [gpt, *[fixed] * chunks]
    parts = zip(models, split_rows(x, batch, chunks))
    return sum(right(each, *part, roles, 1) * len(part[0]) for each, part in parts) / len(x)


def shift_mask(right: Callable, model: Any, batch: Batch, *rest: Any, **how: Any) -> Tensor:
    """Takes for the targets what is made for the tokens."""
    if batch.counts is not None:
        every = torch.where(batch.counts, batch.targets, batch.tokens.roll(-1, -1))
        batch = batch._replace(targets=every, counts=batch.counts.roll(1, -1))
    return right(model, batch, *rest, **how)


def repeat_window(right: Callable, self: Any, window: Batch) -> Callable[[], StepResult]:
    """From the eleventh step on the rows are those of the window before."""
    former, self.former = getattr(self, "former", window), window
    return right(self, former if self.trainer.steps >= 10 else window)


def keep_evaluation_model(right: Callable, self: Any) -> Any:
    """It is loaded once, with the weights of the first evaluation."""
    self.kept_model = getattr(self, "kept_model", None) or right(self)
    return self.kept_model


# --- dropout and remat


def redraw(right: Callable, self: Any, x: Tensor, layer: int, site: str) -> Tensor:
    """A second call at the same place, which is that of the recomputed forward, draws anew."""
    self.calls = getattr(self, "calls", Counter[tuple[int, str]]())
    self.calls[layer, site] += 1
    return right(self, x, layer + 1000 * (self.calls[layer, site] - 1), site)


def with_remat(**names: str) -> Plant:
    """Another remat mode by the name of one; "other" stands for all that are not named."""
    return wrap(model, "through_blocks", lambda right, *args, remat: right(
        *args, remat=names.get(remat, names.get("other", remat))))  # fmt: skip


# --- resuming


def lose_moment(name: str) -> Plant:
    """A resumed run forgets part of Adam's state."""

    def act(trainer: Any, state: Any) -> None:
        for moments in trainer.optimizer.state.values():
            moments[name].zero_()

    return after(bridge, "load", act)


BUGS: dict[str, Plant] = {
    **torch_step.BUGS,
    **torch_formats.BUGS,
    **module_formats.BUGS,
    **torch_world.BUGS,
    "norm-eps": with_norm_eps(1e-6),
    "norm-eps-by-default": with_norm_eps(1e-5),
    "kv-heads-tiled": edit(
        model.repeat_heads, "x_BTGK.repeat_interleave(heads // groups, dim=2)",
        "x_BTGK.repeat(1, 1, heads // groups, 1)",
    ),
    "norm-after-rotation": edit(
        model.Attention.mix_tokens, "if self.config.qk_norm:", "if False:", "return self.attend(",
        "q, k = self.normalize(self.q_norm, q), self.normalize(self.k_norm, k)\n"
        "    return self.attend(",
    ),
    "qkv-bias-dropped": edit(
        model.Attention.forward, "self.qkv(x_RD)",
        "self.qkv.product(x_RD, self.qkv.weight, 0 * self.qkv.bias)",
    ),
    # rows of the head that are no token's, each with a logit of zero
    "padding-counts": edit(loss.mean_loss, "logits_BTV.to", "F.pad(logits_BTV, (0, 8)).to"),
    "lora-unscaled": scale_adapters(LoRALinear, lambda scale: 1.0),
    "lora-scaled-twice": scale_adapters(LoRALinear, lambda scale: scale**2),
    "lora-b-frozen": assign(LoRALinear, "adapt", lambda self, x: self.product(
        self.product(x, self.lora_a, None), self.lora_b.detach() + 0 * self.lora_b, None)),
    "base-trained": train_all(bridge),
    "rope-unscaled": with_rope(factor=1.0),
    "decay-of-all": wrap(optim, "decays", lambda right, name, patterns: right(name)),
    "norms-in-bfloat16": both(
        wrap(model.LayerNorm, "forward", run_in_bfloat16),
        wrap(model.RMSNorm, "forward", run_in_bfloat16),
    ),
    "erf-gelu": wrap(F, "gelu", lambda right, x, approximate: right(x)),
    "softmax-scale": attend_with(lambda q, k, v, size=0.1: (q * (1 + size), k, v)),
    "query-for-key": attend_with(lambda q, k, v: (k, q, v)),
    "values-of-next-head": attend_with(lambda q, k, v: (q, k, v.roll(1, 2))),
    "causal-mask-off-by-one": wrap(Tensor, "tril", lambda right, ones: right(ones, 1)),
    "fused-sees-all": wrap(
        F, "scaled_dot_product_attention", lambda right, q, k, v, **how: right(q, k, v)
    ),
    "documents-seen": forget_of_places(lambda places: replace(
        places, same_BTT=torch.ones_like(places.same_BTT))),
    "positions-not-restarted": forget_of_places(lambda places: replace(
        places, positions_BT=torch.arange(places.t))),
    "fused-sees-documents": wrap(
        F, "scaled_dot_product_attention", lambda right, q, k, v, mask, **how: right(
            q, k, v, torch.ones_like(mask).tril(), **how)),
    "rope-base": with_rope(base=500_000.0),
    "rope-interleaved": edit(
        model.rotate, ".chunk(2, dim=-1)", ".unflatten(-1, (-1, 2)).unbind(-1)", "torch.cat",
        "torch.stack", "dim=-1)\n    return", "dim=-1).flatten(-2)\n    return",
    ),
    "rope-in-float32": edit(
        model.rotate, "cos, sin = cos_TK[..., None, :], sin_TK[..., None, :]",
        "cos, sin = cos_TK[..., None, :].float(), sin_TK[..., None, :].float()",
    ),
    "swiglu-swapped": edit(
        model.MLP.forward, "F.silu(self.gate(x_RD)) * self.up", "F.silu(self.up(x_RD)) * self.gate"
    ),
    "untied-head": edit(model.GPT.logits, "self.embed.weight", "self.embed.weight.detach()"),
    "embedding-by-frequency": edit(
        model.GPT.__init__, "self.head =", "self.embed.scale_grad_by_freq = True\n    self.head ="
    ),
    "positions-from-one": edit(
        model.GPT.hidden, "self.position.weight)", "self.position.weight.roll(-1, 0))"
    ),
    "logits-in-float32": edit(
        model.GPT.logits, "logits_RV = self.head(x_RD, self.embed.weight) if tied",
        "with torch.autocast(x_RD.device.type, enabled=False):\n"
        "        logits_RV = F.linear(x_RD, self.embed.weight) if tied",
    ),
    "residual-in-bfloat16": wrap(model.Block, "forward", run_in_bfloat16),
    # the island's tensors are widened, and autocast narrows them again
    "island-under-autocast": assign(rules, "outside_autocast", lambda function, dtype: (
        lambda *args: function(*(x.to(dtype) if isinstance(x, Tensor) else x for x in args)))),
    # `.float()`, under float64 too
    "island-in-float32": wrap(policy, "as_under", lambda right, *given: replace(
        right(*given), compute="float32")),
    "embedding-rounded-forward": round_forward("embed.weight"),
    "positions-rounded-forward": round_forward("position.weight"),
    "norm-gains-rounded-forward": round_forward("norm1.weight"),
    "norm-biases-rounded-forward": round_forward("norm1.bias"),
    "whole-tree-cast": wrap(step, "batch_loss", cast_whole_tree),
    "tf32-left-on": both(
        assign(precision, "float32_matmul", lambda config: "tf32"),
        round_always(),
    ),
    "tf32-forward-only": assign(RoundedProduct, "backward", staticmethod(multiply_back_in_float32)),
    "gradients-in-compute": products_of_gradients(lambda asked: "float32"),
    "gradients-in-compute-on-ranks": products_of_gradients(
        lambda asked: asked if process_count() == 1 else "float32"
    ),
    "forward-in-gradients-dtype": wrap(
        rules.Rules, "in_own_dtype", lambda right, self, roles, function: right(
            self, replace(roles, compute=roles.grads), function)),
    "targets-shifted": edit(
        step.batch_loss, "dropout), batch,",
        "dropout), batch._replace(targets=batch.targets.roll(1, 1)),",
    ),
    "last-token-dropped": edit(
        step.batch_loss, "dropout), batch,",
        "dropout)[:, :-1], batch.map_arrays(lambda x: x[:, :-1]),",
    ),
    "mean-of-chunks": wrap(chunks, "mean_loss_in_chunks", mean_of_chunks),
    "head-of-one-chunk": wrap(chunks, "mean_loss_in_chunks", head_of_one_chunk),
    "chunks-added-in-compute": wrap(chunks, "mean_loss_in_chunks", cast_the_head_once),
    # each micro-batch divides by its own count, and the means are averaged
    "mean-of-micro-batch-means": edit(
        step.Trainer.micro_batch_loss, "dropout, over)", "dropout, None)"
    ),
    "mean-over-padding": wrap(step, "mean_count", lambda right, window: torch.tensor(
        window.targets[0].numel())),
    "mask-shifted": wrap(step, "batch_loss", shift_mask),
    # where a target does not count, token 0 does
    "ignored-token-counted": assign(
        loss, "average", lambda losses, counts, over: losses.sum() / over),
    "label-smoothing": wrap(F, "cross_entropy", lambda right, *args, size=1e-3: right(
        *args, label_smoothing=size)),
    "batches-differ": wrap(twin.TorchTwin, "step", repeat_window),
    "evaluation-drops": edit(step.Trainer.evaluate, "roles, None,", "roles, self.dropout(0),"),
    "evaluation-mean-in-compute": edit(
        step.Trainer.evaluate, ".mean()",
        ".mean().to(dtype(self.roles.compute)).to(losses[0].dtype)",
    ),
    "stale-evaluation-weights": wrap(OtherPolicy, "evaluation_model", keep_evaluation_model),
    "sampled-under-training-policy": edit(
        step.Trainer.logits, "self.evaluation_model()", "self.model, self.roles"
    ),
    "whole-context-cut": wrap(twin.TorchTwin, "logits", lambda right, self, tokens: right(
        self, tokens[-self.config.model.context + 1 :])),
    "logits-one-late": wrap(
        twin.TorchTwin, "logits", lambda right, self, tokens: right(
            self, tokens[: max(1, len(tokens) - 1)])
    ),
    "mask-without-micro-step": edit(Dropout.__init__, "step), micro_step)", "step), 0)"),
    "mask-without-layer": edit(Dropout.key_of, "layer + 1", "min(layer, 0) + 1"),
    "dropout-not-rescaled": edit(Dropout.__call__, "x * (1 / (1 - self.rate))", "x"),
    "dropout-redrawn": wrap(Dropout, "__call__", redraw),
    "mask-probability": wrap(dropout, "bernoulli", lambda right, key, p, *rest, size=0.01: right(
        key, p + size, *rest)),
    "sqrt-runs-block": with_remat(sqrt="block"),
    "remat-does-nothing": both(
        with_remat(other="none"), assign(model, "remat_sublayer", lambda sublayer, remat: sublayer)
    ),
    "blocks-masked-as-first": wrap(  # triu without its diagonal
        Tensor, "triu", lambda right, ones, k: right(ones, 1)
    ),
    "moments-lost": lose_moment("exp_avg_sq"),
    "adam-count-lost": lose_moment("step"),
    "growth-tracker-lost": edit(bridge.load, "state.good_steps", "0"),
}  # fmt: skip
