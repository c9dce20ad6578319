"""Planted bugs of the PyTorch twin: small, named, each a mistake somebody has made.

Those of the step's stages are in `torch_step`, of several devices in `torch_world`, of narrow
formats in `narrow_formats` and `torch_formats`, of modules' formats in `module_formats`.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

from lockstep.config import chunks as in_chunks
from lockstep.config import policy
from lockstep.config.policy import Roles
from lockstep.data.batch import Batch
from lockstep.model import rotary
from lockstep.parity.bug import Bug
from lockstep.twin import StepResult
from mutants import module_formats, narrow_formats, torch_formats, torch_step, torch_world
from mutants.configs import (
    BF16,
    BF16_STREAM,
    DDP,
    DECODER,
    EVALUATED,
    FP16,
    GPT2,
    GRADS,
    LEAN,
    LEAN_BF16,
    LORA,
    MASKED,
    PACKED,
)
from mutants.declare import Declare, after_each, replaces, wraps
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

torch, F = Later("torch"), Later("torch.nn.functional")
attention, bridge = Later("torch_ref.extra.attention"), Later("torch_ref.io.bridge")
chunks, evaluation = Later("torch_ref.extra.chunks"), Later("torch_ref.extra.evaluation")
dropout, loss = Later("torch_ref.dropout"), Later("torch_ref.loss")
lora, optim = Later("torch_ref.extra.lora"), Later("torch_ref.optim")
model, packed = Later("torch_ref.model"), Later("torch_ref.extra.packed")
precision, rules = Later("torch_ref.precision"), Later("torch_ref.extra.rules")
processes = Later("torch_ref.extra.mesh.processes")
products, step = Later("torch_ref.extra.formats.products"), Later("torch_ref.step")
stateless, twin = Later("torch.nn.utils.stateless"), Later("torch_ref.twin")

Tensor = Any
BUGS: dict[str, Bug] = (
    torch_step.BUGS
    | torch_formats.BUGS
    | narrow_formats.TORCH
    | module_formats.TORCH
    | torch_world.BUGS
)
bug = Declare("torch", BUGS)


# --- the rows of the data


def change_targets(change: Callable[[Batch], Batch]) -> Plant:
    return wrap(
        step, "batch_loss", lambda right, gpt, batch, *rest: right(gpt, change(batch), *rest)
    )


@bug(rung=2)
def targets_shifted() -> Plant:
    """Targets are one token off."""
    return change_targets(lambda batch: batch._replace(targets=batch.targets.roll(1, 1)))


@bug(rung=2)
@wraps(step, "mean_loss")
def last_token_dropped(right, logits, batch, *rest):
    """The last target of each row does not count."""
    return right(logits[:, :-1], batch.map_arrays(lambda x: x[:, :-1]), *rest)


@bug(rung=8)
@wraps(twin, "TorchTwin.step")
def batches_differ(right: Callable, self: Any, window: Batch) -> Callable[[], StepResult]:
    """From the 11th step on, the former window again."""
    former, self.former = getattr(self, "former", window), window
    return right(self, former if self.trainer.steps >= 10 else window)


# --- the model


def run_in_bfloat16(right: Callable, self: Any, x: Tensor, *rest: Any) -> Tensor:
    return right(self, x.bfloat16(), *rest).to(x.dtype)


def attend_with(change: Callable) -> Plant:
    """The written-out attention of changed queries, keys and values."""
    return wrap(
        model, "attend", lambda right, q, k, v, *rest, **how: right(*change(q, k, v), *rest, **how)
    )


def forget_of_places(change: Callable[[Any], Any]) -> Plant:
    """Drops some of what is known of a batch's segments."""
    return wrap(packed.Segments, "of", lambda right, segments: change(right(segments)))


def with_rope(**changed: float) -> Plant:
    return wrap(rotary, "table", lambda right, t, k, rope: right(t, k, rope._replace(**changed)))


def with_norm_eps(eps: float) -> Plant:
    """Gives all norms this epsilon."""

    def build(right: Callable, self: Any, config: Any, *rest: Any, **how: Any) -> None:
        right(self, replace(config, norm_eps=eps), *rest, **how)

    return both(wrap(model.Layers, "__init__", build), wrap(model.GPT, "__init__", build))


@bug(rung=2)
def norm_eps(size: float = 1e-6) -> Plant:
    """The norms' epsilon is 1e-6 for 1e-5."""
    return with_norm_eps(size)


@bug(rung=2, **DECODER)
def norm_eps_by_default() -> Plant:
    """Epsilon is 1e-5 whatever the config says."""
    return with_norm_eps(1e-5)


@bug(rung=2, **GPT2 | LEAN)
@wraps(F, "gelu")
def erf_gelu(right, x, approximate):
    """GELU has its erf form, not the tanh form."""
    return right(x)


@bug(rung=2)
def softmax_scale(size: float = 0.1) -> Plant:
    """Scores are a tenth too large."""
    return attend_with(lambda q, k, v: (q * (1 + size), k, v))


@bug(rung=2)
def query_for_key() -> Plant:
    """Queries and keys change places."""
    return attend_with(lambda q, k, v: (k, q, v))


@bug(rung=2)
def values_of_next_head() -> Plant:
    """Each head takes the next one's values."""
    return attend_with(lambda q, k, v: (q, k, v.roll(1, 2)))


@bug(rung=2)
@wraps(torch, "Tensor.tril")
def causal_mask_off_by_one(right, ones):
    """Each token sees the one after it."""
    return right(ones, 1)


@bug(rung=2)
def rope_base() -> Plant:
    """RoPE has base 500,000."""
    return with_rope(base=500_000.0)


@bug(rung=2)
@replaces(model, "rotate")
def rope_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE rotates neighbours, not halves."""
    cos, sin = cos[..., None, :], sin[..., None, :]
    left, right = x.to(cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    pairs = torch.stack([left * cos - right * sin, right * cos + left * sin], dim=-1)
    return pairs.flatten(-2).to(x.dtype)


@bug(rung=2, **DECODER)
def rope_unscaled() -> Plant:
    """Llama 3's scaling of RoPE is left out."""
    return with_rope(factor=1.0)


@bug(rung=2)
@replaces(model, "MLP.forward")
def swiglu_swapped(self, x):
    """SwiGLU's gate and up change places."""
    return self.down(F.silu(self.up(x)) * self.gate(x))


@bug(rung=2, **DECODER)
def kv_heads_tiled() -> Plant:
    """Heads share keys in turn, not with neighbours."""

    def tile(x: Tensor, heads: int) -> Tensor:
        return x.repeat(1, 1, heads // x.shape[2], 1)

    return both(assign(model, "repeat_heads", tile), assign(attention, "repeat_heads", tile))


@bug(rung=2, **DECODER)
@after_each(model, "Attention.__init__")
def norm_after_rotation(self: Any, *_: Any, **__: Any) -> None:
    """Queries and keys are rotated, then normalized."""
    attend, q_norm, k_norm = self.attend, self.q_norm.forward, self.k_norm.forward
    self.q_norm.forward = self.k_norm.forward = lambda x: x
    self.attend = lambda q, k, *rest: attend(q_norm(q).to(q.dtype), k_norm(k).to(k.dtype), *rest)


@bug(rung=2, **DECODER)
@after_each(model, "Attention.__init__")
def qkv_bias_dropped(self: Any, *_: Any, **__: Any) -> None:
    """Queries, keys and values lack their bias."""
    product = self.qkv.product
    self.qkv.product = lambda x, weight, bias: product(x, weight, 0 * bias)


@bug(rung=2, **DECODER)
@wraps(step, "mean_loss")
def padding_counts(right, logits, *rest):
    """Padding of the vocabulary is in the softmax, with logits of zero."""
    return right(F.pad(logits, (0, 8)), *rest)


@bug(rung=2, **GPT2 | LEAN)
@wraps(model, "Positions.select")
def positions_from_one(right, self, table):
    """Positions count from one."""
    return right(self, table.roll(-1, 0))


@bug(rung=3, **GPT2 | LEAN)
@wraps(model, "TiedHead.forward")
def untied_head(right, self, x, weight):
    """The tied head gives no gradient to the embedding."""
    return right(self, x, weight.detach())


@bug(rung=3)
@after_each(model, "GPT.__init__")
def embedding_by_frequency(self, *_, **__):
    """Gradients are divided by how often a token comes."""
    self.embed.scale_grad_by_freq = True


# --- adapters


@bug(rung=2, **LORA)
def lora_unscaled() -> Plant:
    """An adapter is added without alpha / rank."""
    return scale_adapters(lora.LoRALinear, lambda scale: 1.0)


@bug(rung=2, **LORA)
def lora_scaled_twice() -> Plant:
    """Both matrices of an adapter are multiplied by alpha / rank."""
    return scale_adapters(lora.LoRALinear, lambda scale: scale**2)


@bug(rung=3, **LORA)
@replaces(lora, "LoRALinear.adapt")
def lora_b_frozen(self, x):
    """An adapter trains its matrix A alone."""
    return self.product(
        self.product(x, self.lora_a, None), self.lora_b.detach() + 0 * self.lora_b, None
    )


@bug(rung=1, **LORA)
def base_trained() -> Plant:
    """The weights under the adapters are trained, too."""
    return train_all(bridge)


# --- precision


def round_forward(ending: str) -> Plant:
    """Rounds parameters to bfloat16 in the forward pass; their gradients stay as they are."""

    def wrong(right: Callable, gpt: Any, *rest: Any) -> Tensor:
        chosen = {name: p for name, p in gpt.named_parameters() if name.endswith(ending)}
        rounded = {name: p + (p.bfloat16().float() - p).detach() for name, p in chosen.items()}
        with stateless._reparametrize_module(gpt, rounded):
            return right(gpt, *rest)

    return wrap(model.GPT, "hidden", wrong)


def products_of_gradients(kind: Callable[[str], str]) -> Plant:
    """Gradients have another dtype than the one that is asked for."""
    makers = ("linear_backward_in", "matmul_backward_in")
    return both(*(wrap(rules, name, lambda right, asked: right(kind(asked))) for name in makers))


@bug(rung=2)
@wraps(model, "rotate")
def rope_in_float32(right, x, *tables):
    """RoPE rotates in float32, under float64."""
    return right(x, *(table.float() for table in tables))


@bug(rung=2, **LEAN_BF16)
@replaces(model, "widen")
def norms_in_bfloat16(x: Tensor) -> Tensor:
    """Norms compute in bfloat16."""
    return x.bfloat16()


@bug(rung=2, **LEAN_BF16)
def residual_in_bfloat16() -> Plant:
    """The residual stream is bfloat16."""
    return wrap(model.Block, "forward", run_in_bfloat16)


@bug(rung=2, **BF16_STREAM)
@after_each(rules, "FeatureLayers.__init__")
def stream_in_float32(self: Any, *_: Any, **__: Any) -> None:
    """The residual stream is float32 where the policy says bfloat16."""
    self.stream = torch.float32


@bug(rung=2, **GPT2, **LEAN_BF16)
@replaces(model, "TiedHead.forward")
def logits_in_float32(self: Any, x: Tensor, weight: Tensor) -> Tensor:
    """The head is not cast: better than allowed."""
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x, weight)


@bug(rung=3, **LEAN_BF16)
@wraps(step, "batch_loss")
def whole_tree_cast(right: Callable, gpt: Any, batch: Batch, roles: Roles, *rest: Any) -> Tensor:
    """All parameters are cast at once."""
    kind = precision.dtype(roles.compute)
    weights = {name: p.to(kind) for name, p in gpt.named_parameters()}
    call = torch.func.functional_call
    return right(lambda *args: call(gpt, weights, args), batch, roles, *rest)


@bug(rung=2, **GPT2, **LEAN_BF16)
def embedding_rounded_forward() -> Plant:
    """The embedding is rounded in the forward pass, under bf16."""
    return round_forward("embed.weight")


@bug(rung=2, **GPT2, **LEAN_BF16)
def positions_rounded_forward() -> Plant:
    """Positions are rounded in the forward pass, under bf16."""
    return round_forward("position.weight")


@bug(rung=2, **GPT2, **LEAN_BF16)
def norm_gains_rounded_forward() -> Plant:
    """Gains of norms are rounded in the forward pass, under bf16."""
    return round_forward("norm1.weight")


@bug(rung=2, **GPT2, **LEAN_BF16)
def norm_biases_rounded_forward() -> Plant:
    """Biases of norms are rounded in the forward pass, under bf16."""
    return round_forward("norm1.bias")


@bug(rung=2, fp32_islands="blocks.*.mlp", **LEAN_BF16)
@replaces(rules, "outside_autocast")
def island_under_autocast(function, dtype):
    """An island is widened, and narrowed by autocast."""
    return lambda *args: function(
        *(x.to(dtype) if isinstance(x, torch.Tensor) else x for x in args)
    )


@bug(rung=2, fp32_islands="blocks.*.mlp", **LEAN)
@wraps(policy, "as_under")
def island_in_float32(right, *given):
    """Islands are float32, under float64."""
    return replace(right(*given), compute="float32")


@bug(rung=2, policy="fp32", **LEAN)
def tf32_left_on() -> Plant:
    """TF32 is on under fp32."""
    return both(assign(precision, "float32_matmul", lambda config: "tf32"), round_always())


@bug(rung=3, policy="tf32", **LEAN)
def tf32_forward_only() -> Plant:
    """The backward pass does not round to TF32."""

    def multiply(context: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        a, b, *_ = context.saved_tensors
        dbias = dy.sum(0) if context.needs_input_grad[3] else None
        return None, dy @ b.mT, a.mT @ dy, dbias, None, None, None

    return assign(products.RoundedProduct, "backward", staticmethod(multiply))


@bug(rung=3, **GRADS)
def gradients_in_compute() -> Plant:
    """The backward pass computes in float32, too."""
    return products_of_gradients(lambda asked: "float32")


@bug(rung=2, **GRADS)
@wraps(rules, "FeatureLayers.in_own_dtype")
def forward_in_gradients_dtype(right, self, roles, function):
    """The forward pass computes in float16, too."""
    return right(self, replace(roles, compute=roles.grads), function)


@bug(rung=11, **GRADS | DDP)
def gradients_in_compute_on_ranks() -> Plant:
    """On a mesh the policy's grads are forgotten."""
    return products_of_gradients(
        lambda asked: asked if processes.process_count() == 1 else "float32"
    )


# --- the loss


def split_rows(x: Tensor, batch: Batch, chunks: int) -> list[tuple[Tensor, Batch]]:
    rows = in_chunks.size(len(x), chunks)
    targets = batch.targets.flatten().split(rows)
    return [(each, batch._replace(targets=own)) for each, own in zip(x.split(rows), targets)]


@bug(rung=2)
def label_smoothing(size: float = 1e-3) -> Plant:
    """Labels are smoothed by a thousandth."""
    return wrap(F, "cross_entropy", lambda right, *args: right(*args, label_smoothing=size))


@bug(rung=3, loss_chunks="3", **LEAN)
@wraps(chunks, "mean_loss_in_chunks")
def mean_of_chunks(
    right: Callable, gpt: Any, x: Tensor, batch: Batch, roles: Roles, chunks: int, *_: None
) -> Tensor:
    """Chunks count alike, the smaller last one too."""
    means = [right(gpt, *each, roles, 1) for each in split_rows(x, batch, chunks)]
    return torch.stack(means).mean()


@bug(rung=3, loss_chunks="3", **GPT2 | LEAN)
@wraps(chunks, "mean_loss_in_chunks")
def head_of_one_chunk(
    right: Callable, gpt: Any, x: Tensor, batch: Batch, roles: Roles, chunks: int, *_: None
) -> Tensor:
    """The head's weights get one chunk's gradient."""
    fixed = SimpleNamespace(logits=lambda x: F.linear(x, gpt.embed.weight.detach()))
    parts = zip([gpt, *[fixed] * chunks], split_rows(x, batch, chunks))
    return sum(right(each, *part, roles, 1) * len(part[0]) for each, part in parts) / len(x)


@bug(rung=3, loss_chunks="8", **GPT2, **LEAN_BF16)
@wraps(chunks, "mean_loss_in_chunks")
def chunks_added_in_compute(
    right: Callable, net: Any, x: Tensor, batch: Batch, roles: Roles, *rest: Any
) -> Tensor:
    """The head's gradient is added up in bfloat16."""
    table = net.embed.weight.to(precision.dtype(roles.compute))
    cast = SimpleNamespace(logits=lambda x: net.head(x, table))
    return right(cast, x, batch, roles, *rest)


# --- targets that do not count, and several documents a row


@bug(rung=5, **MASKED | {"accum": 4})
@wraps(step, "Trainer.micro_batch_loss")
def mean_of_micro_batch_means(right, self, window, target_count, number):
    """Each micro-batch takes the mean over its own targets, and the means are averaged."""
    return right(self, window, None, number)


@bug(rung=3, **MASKED)
@wraps(step, "mean_count")
def mean_over_padding(right, window):
    """The loss is divided by all targets, ignored ones too."""
    return torch.tensor(window.targets[0].numel())


@bug(rung=3, **MASKED)
def mask_shifted() -> Plant:
    """The mask is that of the tokens, not of the targets."""

    def shift(batch: Batch) -> Batch:
        if batch.counts is None:
            return batch
        every = torch.where(batch.counts, batch.targets, batch.tokens.roll(-1, -1))
        return batch._replace(targets=every, counts=batch.counts.roll(1, -1))

    return change_targets(shift)


@bug(rung=3, loss_chunks="3", **MASKED)
@replaces(loss, "average")
def ignored_token_counted(losses, counts, target_count):
    """An ignored target counts in its chunk, as token 0."""
    return losses.sum() / target_count


@bug(rung=2, **PACKED)
def documents_seen() -> Plant:
    """A token sees those of the document before."""
    return forget_of_places(
        lambda positions: replace(positions, same_BTT=torch.ones_like(positions.same_BTT))
    )


@bug(rung=2, **PACKED, **GPT2)
def positions_not_restarted() -> Plant:
    """Positions count through all documents of a row."""
    return forget_of_places(
        lambda positions: replace(positions, positions_BT=torch.arange(positions.t))
    )


# --- fast numerics


@bug(rung=9, **PACKED)
@wraps(F, "scaled_dot_product_attention")
def fused_sees_documents(right, q, k, v, mask, **how):
    """A fused kernel sees all documents."""
    return right(q, k, v, torch.ones_like(mask).tril(), **how)


@bug(rung=9, **BF16)
@wraps(torch, "Tensor.triu")
def blocks_masked_as_first(right, ones, k):
    """Each causal block is masked as if it stood first: triu without its diagonal."""
    return right(ones, 1)


@bug(rung=9)
@wraps(F, "scaled_dot_product_attention")
def fused_sees_all(right, q, k, v, **how):
    """Fused attention lacks its causal mask."""
    return right(q, k, v)


# --- evaluation and sampling


@bug(rung=2)
@wraps(step, "Trainer.evaluate")
def evaluation_drops(right: Callable, self: Any, batches: Batch) -> Tensor:
    """Dropout is on in evaluation."""
    batch_loss = self.batch_loss

    def with_dropout(model: Any, batch: Batch, roles: Roles, _: None, over: Any) -> Tensor:
        return batch_loss(model, batch, roles, self.dropout(0), over)

    with mock.patch.object(self, "batch_loss", with_dropout):
        return right(self, batches)


@bug(rung=2)
@wraps(twin, "TorchTwin.logits")
def logits_one_late(right, self, tokens):
    """The logits are those of one token before."""
    return right(self, tokens[: max(1, len(tokens) - 1)])


@bug(rung=2, **LEAN)
@wraps(twin, "TorchTwin.logits")
def whole_context_cut(right, self, tokens):
    """The model never sees its whole context."""
    return right(self, tokens[-self.config.model.context + 1 :])


@bug(rung=2, **LEAN_BF16)
@wraps(step, "Trainer.evaluate")
def evaluation_mean_in_compute(right: Callable, self: Any, batches: Batch) -> Tensor:
    """A validation loss is rounded to bfloat16."""
    mean = right(self, batches)
    return mean.to(precision.dtype(self.roles.compute)).to(mean.dtype)


@bug(rung=2, **EVALUATED)
@wraps(evaluation, "evaluation_model")
def stale_evaluation_weights(right: Callable, make: Any, dtypes: Any, trainer: Any) -> Any:
    """Later evaluations use the first one's weights."""
    trainer.kept_model = getattr(trainer, "kept_model", None) or right(make, dtypes, trainer)
    return trainer.kept_model


@bug(rung=2, **EVALUATED)
@wraps(step, "Trainer.logits")
def sampled_under_training_policy(right: Callable, self: Any, batch: Batch) -> Tensor:
    """Logits are computed under the training policy."""
    with mock.patch.object(self, "evaluation_model", lambda: (self.model, self.roles)):
        return right(self, batch)


# --- dropout and remat


def with_remat(**names: str) -> Plant:
    """Another remat mode by the name of one; "other" stands for all that are not named."""
    return wrap(
        model,
        "through_blocks",
        lambda right, *args, remat: right(*args, remat=names.get(remat, names.get("other", remat))),
    )


@bug(rung=8)
@wraps(dropout, "Dropout.__init__")
def mask_without_micro_step(right, self, rate, **key):
    """All micro-batches share their masks."""
    return right(self, rate, **key | {"micro_step": 0})


@bug(rung=8)
@wraps(dropout, "Dropout.key_of")
def mask_without_layer(right, self, layer, site):
    """All layers share their masks."""
    return right(self, min(layer, 0), site)


@bug(rung=8)
@wraps(dropout, "Dropout.__call__")
def dropout_not_rescaled(right, self, x, *place):
    """Dropout does not scale the kept values up."""
    return right(self, x, *place) * (1 - self.rate)


@bug(rung=8)
def mask_probability(size: float = 0.01) -> Plant:
    """Masks keep a hundredth more."""
    return wrap(
        dropout, "bernoulli", lambda right, key, p, *rest, **how: right(key, p + size, *rest, **how)
    )


@bug(rung=6, remat="block")
@wraps(dropout, "Dropout.__call__")
def dropout_redrawn(right: Callable, self: Any, x: Tensor, layer: int, site: str) -> Tensor:
    """The recomputed forward draws other masks.

    A second call at the same place is that of the recomputed forward.
    """
    self.calls = getattr(self, "calls", Counter[tuple[int, str]]())
    self.calls[layer, site] += 1
    return right(self, x, layer + 1000 * (self.calls[layer, site] - 1), site)


@bug(rung=6, remat="sqrt")
def sqrt_runs_block() -> Plant:
    """Remat sqrt runs block."""
    return with_remat(sqrt="block")


@bug(rung=6, remat="block")
def remat_does_nothing() -> Plant:
    """Nothing is recomputed."""
    return both(
        with_remat(other="none"), assign(model, "remat_sublayer", lambda sublayer, remat: sublayer)
    )


# --- resuming


def lose_moment(name: str) -> Plant:
    """A resumed run forgets part of Adam's state."""

    def lose(trainer: Any, state: Any) -> None:
        for moments in trainer.optimizer.state.values():
            moments[name].zero_()

    return after(bridge, "load", lose)


@bug(rung=1)
def moments_lost() -> Plant:
    """A resumed run forgets Adam's second moments."""
    return lose_moment("exp_avg_sq")


@bug(rung=1)
def adam_count_lost() -> Plant:
    """A resumed run starts Adam's count anew."""
    return lose_moment("step")


@bug(rung=1, **FP16)
@wraps(bridge, "load")
def growth_tracker_lost(right, trainer, state):
    """A resumed run forgets its good steps."""
    return right(trainer, replace(state, good_steps=0))
