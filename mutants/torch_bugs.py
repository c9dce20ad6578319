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
from mutants.patch import Plant, after, assign, both, round_always, scale_adapters, train_all, wrap
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


def normalize_in_bfloat16(right: Callable, self: Any, x: Tensor) -> Tensor:
    return right(self, x.bfloat16()).to(x.dtype)


def attend_with(change: Callable) -> Plant:
    """The written-out attention of changed queries, keys and values."""
    return wrap(model, "attend", lambda right, q, k, v, places, *, dtype, matmul, **size: right(
        *change(q, k, v, **size), places, dtype=dtype, matmul=matmul))  # fmt: skip


def forget_of_places(change: Callable[[Segments], Segments]) -> Plant:
    """Drops some of what is known of a batch's segments."""
    return wrap(Segments, "of", lambda right, segments: change(right(segments)))


def rotate_neighbours(x: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    cos, sin = cos_TK[..., None, :], sin_TK[..., None, :]
    even, odd = x.to(cos.dtype)[..., ::2], x.to(cos.dtype)[..., 1::2]
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    return turned.flatten(-2).to(x.dtype)


def rotate_in_float32(right: Callable, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return right(x, cos.float(), sin.float()).to(x.dtype)


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


def tile_heads(x: Tensor, heads: int) -> Tensor:
    """Heads that are neighbours get the keys of different groups."""
    return x.repeat(1, 1, heads // x.shape[2], 1)


def normalize_rotated(self: model.Attention, x: Tensor, places: model.Places) -> Tensor:
    heads, groups = self.config.n_head, self.config.kv_heads
    y = self.qkv(x).reshape(-1, places.t, heads + 2 * groups, self.config.d_head)
    q, k, v = y.split([heads, groups, groups], dim=2)
    cos, sin = (places.look_up(table) for table in (self.cos, self.sin))
    q, k = (model.rotate(each, cos, sin) for each in (q, k))
    q, k = self.normalize(self.q_norm, q), self.normalize(self.k_norm, k)
    return self.proj(self.attend(q, k, v, places).reshape(len(x), -1))


def drop_bias(self: model.Attention, *args: Any) -> None:
    right = self.qkv.product

    def product(x: Tensor, weight: Tensor, bias: Any) -> Tensor:
        return right(x, weight, 0 * bias)

    self.qkv.product = product


def count_padding(right: Callable, logits: Tensor, *rest: Any) -> Tensor:
    """Rows of the head that are no token's, each with a logit of zero."""
    return right(F.pad(logits, (0, 8)), *rest)


def gate_up(self: Any, x: Tensor) -> Tensor:
    return self.down(self.gate(x) * F.silu(self.up(x)))


def after_making(change: Callable[[Any], None]) -> Plant:
    """A change to each GPT once it is made."""
    return after(model.GPT, "__init__", lambda self, *args, **rest: change(self))


def untie(gpt: Any) -> None:
    right = gpt.head.product
    gpt.head.product = lambda x, weight, bias: right(x, weight.detach(), bias)


def scale_by_frequency(gpt: Any) -> None:
    gpt.embed.scale_grad_by_freq = True


def count_from_one(gpt: Any) -> None:
    right = gpt.embed.forward

    def look_up(tokens: Tensor) -> Tensor:
        shift = torch.roll(gpt.position.weight, -1, 0) - gpt.position.weight
        return right(tokens) + shift[: tokens.shape[1]]

    gpt.embed.forward = look_up


def widen_head(gpt: Any) -> None:
    def product(x: Tensor, weight: Tensor, bias: None) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, weight)

    gpt.head.product = product


def run_block_in_bfloat16(right: Callable, self: Any, x: Tensor, *rest: Any) -> Tensor:
    return right(self, x.bfloat16(), *rest).to(x.dtype)


# --- precision


def widen_under_autocast(function: Callable, dtype: torch.dtype) -> Callable:
    """The island's tensors are widened, and autocast narrows them again."""
    return lambda *args: function(*(x.to(dtype) if isinstance(x, Tensor) else x for x in args))


def widen_to_float32(right: Callable, roles: Roles, name: str) -> Roles:
    """`.float()`, under float64 too."""
    return replace(right(roles, name), compute="float32")


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


def shift_targets(right: Callable, logits: Tensor, batch: Batch, *rest: Any) -> Tensor:
    return right(logits, batch._replace(targets=batch.targets.roll(1, 1)), *rest)


def drop_last_token(right: Callable, logits: Tensor, batch: Batch, *rest: Any) -> Tensor:
    return right(logits[:, :-1], batch.map_arrays(lambda x: x[:, :-1]), *rest)


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


def drop_in_evaluation(right: Callable, self: Any, batches: Batch) -> Tensor:
    healthy = self.batch_loss
    self.batch_loss = lambda model, batch, roles, _, over: healthy(
        model, batch, roles, self.dropout(0), over)  # fmt: skip
    try:
        return right(self, batches)
    finally:
        del self.batch_loss


def keep_evaluation_model(right: Callable, self: Any) -> Any:
    """It is loaded once, with the weights of the first evaluation."""
    self.kept_model = getattr(self, "kept_model", None) or right(self)
    return self.kept_model


@torch.no_grad()
def logits_of_training(self: step.Trainer, batch: Batch) -> Tensor:
    with precision.autocast(self.roles, self.device):
        return self.model(batch)


def evaluate_in_compute(right: Callable, self: step.Trainer, batches: Batch) -> Tensor:
    """The mean is taken, and reported, in the compute dtype."""
    loss = right(self, batches)
    return loss.to(precision.dtype(self.roles.compute)).to(loss.dtype)


# --- dropout and remat


def forget_micro_step(right: Callable, self: Dropout, rate: float, **key: Any) -> None:
    right(self, rate, **(key | {"micro_step": 0}))


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


def lose_growth_tracker(trainer: Any, state: Any) -> None:
    if trainer.scaler.is_enabled():
        trainer.scaler.load_state_dict(trainer.scaler.state_dict() | {"_growth_tracker": 0})


BUGS: dict[str, Plant] = {
    **torch_step.BUGS,
    **torch_formats.BUGS,
    **module_formats.BUGS,
    **torch_world.BUGS,
    "norm-eps": with_norm_eps(1e-6),
    "norm-eps-by-default": with_norm_eps(1e-5),
    "kv-heads-tiled": assign(model, "repeat_heads", tile_heads),
    "norm-after-rotation": assign(model.Attention, "forward", normalize_rotated),
    "qkv-bias-dropped": after(model.Attention, "__init__", drop_bias),
    "padding-counts": wrap(step, "mean_loss", count_padding),
    "lora-unscaled": scale_adapters(LoRALinear, lambda scale: 1.0),
    "lora-scaled-twice": scale_adapters(LoRALinear, lambda scale: scale**2),
    "lora-b-frozen": assign(LoRALinear, "adapt", lambda self, x: self.product(
        self.product(x, self.lora_a, None), self.lora_b.detach() + 0 * self.lora_b, None)),
    "base-trained": train_all(bridge),
    "rope-unscaled": with_rope(factor=1.0),
    "decay-of-all": wrap(optim, "decays", lambda right, name, patterns: right(name)),
    "norms-in-bfloat16": both(
        wrap(model.LayerNorm, "forward", normalize_in_bfloat16),
        wrap(model.RMSNorm, "forward", normalize_in_bfloat16),
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
    "rope-interleaved": assign(model, "rotate", rotate_neighbours),
    "rope-in-float32": wrap(model, "rotate", rotate_in_float32),
    "swiglu-swapped": assign(model.MLP, "forward", gate_up),
    "untied-head": after_making(untie),
    "embedding-by-frequency": after_making(scale_by_frequency),
    "positions-from-one": after_making(count_from_one),
    "logits-in-float32": after_making(widen_head),
    "residual-in-bfloat16": wrap(model.Block, "forward", run_block_in_bfloat16),
    "island-under-autocast": assign(rules, "outside_autocast", widen_under_autocast),
    "island-in-float32": wrap(policy, "as_under", widen_to_float32),
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
    "targets-shifted": wrap(step, "mean_loss", shift_targets),
    "last-token-dropped": wrap(step, "mean_loss", drop_last_token),
    "mean-of-chunks": wrap(chunks, "mean_loss_in_chunks", mean_of_chunks),
    "head-of-one-chunk": wrap(chunks, "mean_loss_in_chunks", head_of_one_chunk),
    "chunks-added-in-compute": wrap(chunks, "mean_loss_in_chunks", cast_the_head_once),
    # each micro-batch divides by its own count, and the means are averaged
    "mean-of-micro-batch-means": wrap(
        step.Trainer, "micro_batch_loss", lambda right, self, window, over, micro_step: right(
            self, window, None, micro_step)),
    "mean-over-padding": wrap(step, "mean_count", lambda right, window: torch.tensor(
        window.targets[0].numel())),
    "mask-shifted": wrap(step, "batch_loss", shift_mask),
    # where a target does not count, token 0 does
    "ignored-token-counted": assign(
        loss, "average", lambda losses, counts, over: losses.sum() / over),
    "label-smoothing": wrap(F, "cross_entropy", lambda right, *args, size=1e-3: right(
        *args, label_smoothing=size)),
    "batches-differ": wrap(twin.TorchTwin, "step", repeat_window),
    "evaluation-drops": wrap(step.Trainer, "evaluate", drop_in_evaluation),
    "evaluation-mean-in-compute": wrap(step.Trainer, "evaluate", evaluate_in_compute),
    "stale-evaluation-weights": wrap(OtherPolicy, "evaluation_model", keep_evaluation_model),
    "sampled-under-training-policy": assign(step.Trainer, "logits", logits_of_training),
    "whole-context-cut": wrap(twin.TorchTwin, "logits", lambda right, self, tokens: right(
        self, tokens[-self.config.model.context + 1 :])),
    "logits-one-late": wrap(
        twin.TorchTwin, "logits", lambda right, self, tokens: right(
            self, tokens[: max(1, len(tokens) - 1)])
    ),
    "mask-without-micro-step": wrap(Dropout, "__init__", forget_micro_step),
    "mask-without-layer": wrap(Dropout, "__call__", lambda right, self, x, layer, site: right(
        self, x, min(layer, 0), site)),
    "dropout-not-rescaled": wrap(Dropout, "__call__", lambda right, self, x, *place: right(
        self, x, *place) * (1 - self.rate)),
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
    "growth-tracker-lost": after(bridge, "load", lose_growth_tracker),
}  # fmt: skip
