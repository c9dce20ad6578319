"""Planted bugs: small, named, each a mistake somebody has made, for the life of one process.

`lockstep/parity/bugs.py` says what each is and which rung must catch it.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from lockstep.twin import StepResult
from mutants import torch_recipe
from torch_ref import bridge, dropout, model, optim, precision, remat, step, train

# --- the loss scale


def unscaled() -> None:
    step.grad_scaler = lambda config, device: torch.amp.GradScaler(device.type, enabled=False)


def growth_one_late() -> None:
    scaler = precision.grad_scaler

    def late(config: Any, device: Any) -> torch.amp.GradScaler:
        made = scaler(config, device)
        if made.is_enabled():
            made.set_growth_interval(made.get_growth_interval() + 1)
        return made

    step.grad_scaler = late


def overflow_not_looked_for() -> None:
    unscale = torch.amp.GradScaler._unscale_grads_

    def blind(self: Any, *args: Any) -> Any:
        found = unscale(self, *args)
        return {device: torch.zeros_like(flag) for device, flag in found.items()}

    torch.amp.GradScaler._unscale_grads_ = blind


# --- the optimizer


def no_bias_correction() -> None:
    """Adam's correction tends to 1 as its count grows."""
    far = 10_000_000
    wrapped = torch.optim.AdamW.step

    def stepped(self: Any, *args: Any, **kwargs: Any) -> Any:
        for moments in self.state.values():
            moments["step"] += far
        result = wrapped(self, *args, **kwargs)
        for moments in self.state.values():
            moments["step"] -= far
        return result

    torch.optim.AdamW.step = stepped


def decay_also(kind: str) -> Callable[[], None]:
    def plant() -> None:
        right = optim.decayed
        optim.decayed = lambda name: right(name) or kind in name

    return plant


def with_config(**factors: float) -> Callable[..., None]:
    """AdamW made with an attribute of its config multiplied by 1 + size."""

    def plant(size: float = 0.1) -> None:
        right = optim.adamw
        (name,) = factors

        def wrong(parameters: Any, config: Any) -> Any:
            given = vars(config) | {name: getattr(config, name) * (1 + size)}
            return right(parameters, SimpleNamespace(**given))

        step.adamw = wrong

    return plant


def learning_rate(size: float = 0.1) -> None:
    """The rate that is logged is right; the one that is used is not."""
    wrapped = torch.optim.AdamW.step

    def stepped(self: Any, *args: Any, **kwargs: Any) -> Any:
        for group in self.param_groups:
            group["lr"] *= 1 + size
        return wrapped(self, *args, **kwargs)

    torch.optim.AdamW.step = stepped


def adam_eps(size: float = 1e-6) -> None:
    optim.EPS = size


def betas_swapped() -> None:
    right = optim.adamw

    def wrong(parameters: Any, config: Any) -> Any:
        made = vars(config) | {"beta1": config.beta2, "beta2": config.beta1}
        return right(parameters, SimpleNamespace(**made))

    step.adamw = wrong


def coupled_decay() -> None:
    torch.optim.AdamW = torch.optim.Adam


# --- the model


def norm_eps(size: float = 1e-6) -> None:
    model.EPS = size


def norms_in_bfloat16() -> None:
    for kind in (model.LayerNorm, model.RMSNorm):
        right = kind.forward
        kind.forward = lambda self, x, right=right: right(self, x.bfloat16()).to(x.dtype)


def functional(name: str, wrong: Callable) -> None:
    """Another function in `model`'s F."""
    model.F = SimpleNamespace(**(vars(F) | {name: wrong}))


def erf_gelu() -> None:
    functional("gelu", lambda x, approximate: F.gelu(x))


def attend_with(change: Callable) -> Callable[..., None]:
    """The written-out attention on changed queries, keys and values."""

    def plant(*size: float) -> None:
        right = model.attend
        model.attend = lambda q, k, v, wide: right(*change(q, k, v, *size), wide)

    return plant


def causal_mask_off_by_one() -> None:
    tril = Tensor.tril
    right = model.attend

    def attend(*args: Any) -> Tensor:
        Tensor.tril = lambda self: tril(self, 1)
        try:
            return right(*args)
        finally:
            Tensor.tril = tril

    model.attend = attend


def fused_sees_all() -> None:
    sdpa = F.scaled_dot_product_attention
    functional("scaled_dot_product_attention", lambda q, k, v, is_causal: sdpa(q, k, v))


def rope_base() -> None:
    def table(context: int, head_dim: int) -> tuple[Any, Any]:
        rates = 500_000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        angles = torch.arange(context, dtype=torch.float64)[:, None] * rates
        return angles.cos().numpy(), angles.sin().numpy()

    model.rotary = SimpleNamespace(table=table)


def rope_interleaved() -> None:
    def rotate(x: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        t = x.shape[1]
        cos, sin = cos_TK[:t, None], sin_TK[:t, None]
        wide = x.to(cos.dtype)
        even, odd = wide[..., ::2], wide[..., 1::2]
        turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
        return turned.flatten(-2).to(x.dtype)

    model.rotate = rotate


def rope_in_float32() -> None:
    right = model.rotate
    model.rotate = lambda x, cos, sin: right(x, cos.float(), sin.float()).to(x.dtype)


def swiglu_swapped() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.down(self.gate(x) * F.silu(self.up(x)))

    model.MLP.forward = forward


def after_making(change: Callable[[Any], None]) -> Callable[[], None]:
    """A change to each GPT as it is made."""

    def plant() -> None:
        right = model.GPT.__init__

        def made(self: Any, *args: Any, **kwargs: Any) -> None:
            right(self, *args, **kwargs)
            change(self)

        model.GPT.__init__ = made

    return plant


def untie(gpt: Any) -> None:
    gpt.head = lambda x: F.linear(x, gpt.embed.weight.detach())


def scale_by_frequency(gpt: Any) -> None:
    gpt.embed.scale_grad_by_freq = True


def positions_from_one(gpt: Any) -> None:
    right = gpt.embed.forward

    def look_up(tokens: Tensor) -> Tensor:
        shift = torch.roll(gpt.position.weight, -1, 0) - gpt.position.weight
        return right(tokens) + shift[: tokens.shape[1]]

    gpt.embed.forward = look_up


def logits_in_float32(gpt: Any) -> None:
    def head(x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, gpt.embed.weight)

    gpt.head = head


def residual_in_bfloat16() -> None:
    right = model.Block.forward
    model.Block.forward = lambda self, x, *rest: right(self, x.bfloat16(), *rest).to(x.dtype)


def island_under_autocast() -> None:
    """The island's tensors are widened, and autocast narrows them again."""

    def matmul(function: Callable, roles: Any, module: str) -> Callable:
        wide = precision.dtype(roles.output)
        return lambda *args: function(
            *(x.to(wide) if isinstance(x, Tensor) and roles.island(module) else x for x in args)
        )

    model.matmul = matmul


def island_in_float32() -> None:
    """`.float()`, under float64 too."""
    right = precision.matmul
    model.matmul = lambda function, roles, module: right(
        function, replace(roles, output="float32"), module
    )


def whole_tree_cast() -> None:
    right = step.batch_loss

    def called(gpt: Any, weights: Any, *args: Any) -> Any:
        return functional_call(gpt, weights, args)

    def loss(gpt: Any, batch: Tensor, roles: Any, masks: Any = None) -> Tensor:
        kind = precision.dtype(roles.compute)
        weights = {name: p.to(kind) for name, p in gpt.named_parameters()}
        return right(partial(called, gpt, weights), batch, roles, masks)

    step.batch_loss = loss


# --- loss and data


def targets_shifted() -> None:
    right = step.mean_loss
    step.mean_loss = lambda logits, targets, roles: right(logits, targets.roll(1, 1), roles)


def last_token_dropped() -> None:
    right = step.mean_loss
    step.mean_loss = lambda logits, targets, roles: right(logits[:, :-1], targets[:, :-1], roles)


def label_smoothing(size: float = 1e-3) -> None:
    wrong = partial(F.cross_entropy, label_smoothing=size)
    functional("cross_entropy", wrong)


def batches_differ() -> None:
    """From the eleventh step on the rows are those of the window before."""
    right = train.TorchTwin.step

    def stepped(self: Any, window: Tensor) -> Callable[[], StepResult]:
        former, self.former = getattr(self, "former", window), window
        return right(self, former if self.trainer.step >= 10 else window)

    train.TorchTwin.step = stepped


def evaluation_drops() -> None:
    right = step.Trainer.evaluate

    def evaluate(self: Any, batches: Tensor) -> Tensor:
        loss = step.batch_loss
        step.batch_loss = lambda *args: loss(*args, self.dropout(0))
        try:
            return right(self, batches)
        finally:
            step.batch_loss = loss

    step.Trainer.evaluate = evaluate


def logits_one_late() -> None:
    right = train.TorchTwin.logits
    train.TorchTwin.logits = lambda self, tokens: right(self, tokens[:-1])


# --- dropout and remat


def mask_keyed_without(part: str) -> Callable[[], None]:
    def plant() -> None:
        made, called = dropout.Dropout.__init__, dropout.Dropout.__call__

        def init(self: Any, rate: float, **key: Any) -> None:
            made(self, rate, **(key | ({"micro_step": 0} if part == "micro-step" else {})))

        def call(self: Any, x: Tensor, layer: int, site: str) -> Tensor:
            return called(self, x, min(layer, 0) if part == "layer" else layer, site)

        dropout.Dropout.__init__ = init
        dropout.Dropout.__call__ = call

    return plant


def dropout_not_rescaled() -> None:
    right = dropout.Dropout.__call__
    dropout.Dropout.__call__ = lambda self, x, *place: right(self, x, *place) * (1 - self.rate)


def dropout_redrawn() -> None:
    """A second call at the same place, which is that of the recomputed forward, draws anew."""
    right = dropout.Dropout.__call__

    def call(self: Any, x: Tensor, layer: int, site: str) -> Tensor:
        if not self.rate:
            return x
        self.calls = getattr(self, "calls", Counter[tuple[int, str]]())
        self.calls[layer, site] += 1
        return right(self, x, layer + 1000 * (self.calls[layer, site] - 1), site)

    dropout.Dropout.__call__ = call


def mask_probability(size: float = 0.01) -> None:
    """The probability that masks are drawn with is off; the rescaling is right."""
    right = dropout.bernoulli
    dropout.bernoulli = lambda key, p, *rest: right(key, p + size, *rest)


def sqrt_runs_block() -> None:
    right = remat.through_blocks
    names = {"sqrt": "block"}
    model.through_blocks = lambda *args, remat: right(*args, remat=names.get(remat, remat))


def remat_does_nothing() -> None:
    right = remat.through_blocks
    model.through_blocks = lambda *args, remat: right(*args, remat="none")
    model.remat_sublayer = lambda sublayer, remat: sublayer


# --- resuming, switches


def loses(name: str) -> Callable[[], None]:
    """A resumed run forgets part of its state."""

    def plant() -> None:
        right = bridge.load

        def load(trainer: Any, state: Any) -> None:
            right(trainer, state)
            for moments in trainer.optimizer.state.values():
                if name in moments:
                    moments[name].zero_()
            if name == "growth tracker" and trainer.scaler.is_enabled():
                kept = trainer.scaler.state_dict() | {"_growth_tracker": 0}
                trainer.scaler.load_state_dict(kept)

        bridge.load = load

    return plant


def tf32_left_on() -> None:
    right = precision.configure

    def configure(config: Any) -> torch.device:
        device = right(config)
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        return device

    train.configure = configure


BUGS: dict[str, Callable[..., None]] = {
    **{name: torch_recipe.with_mistake(name) for name in torch_recipe.MISTAKES},
    "fp16-without-scaling": unscaled,
    "growth-one-late": growth_one_late,
    "overflow-not-looked-for": overflow_not_looked_for,
    "no-bias-correction": no_bias_correction,
    "decay-on-norms": decay_also("norm"),
    "decay-on-embeddings": decay_also("embed"),
    "decay": with_config(weight_decay=1),
    "learning-rate": learning_rate,
    "adam-eps": adam_eps,
    "betas-swapped": betas_swapped,
    "coupled-decay": coupled_decay,
    "norm-eps": norm_eps,
    "norms-in-bfloat16": norms_in_bfloat16,
    "erf-gelu": erf_gelu,
    "softmax-scale": attend_with(lambda q, k, v, size=0.1: (q * (1 + size), k, v)),
    "query-for-key": attend_with(lambda q, k, v: (k, q, v)),
    "values-of-next-head": attend_with(lambda q, k, v: (q, k, v.roll(1, 2))),
    "causal-mask-off-by-one": causal_mask_off_by_one,
    "fused-sees-all": fused_sees_all,
    "rope-base": rope_base,
    "rope-interleaved": rope_interleaved,
    "rope-in-float32": rope_in_float32,
    "swiglu-swapped": swiglu_swapped,
    "untied-head": after_making(untie),
    "embedding-by-frequency": after_making(scale_by_frequency),
    "positions-from-one": after_making(positions_from_one),
    "logits-in-float32": after_making(logits_in_float32),
    "residual-in-bfloat16": residual_in_bfloat16,
    "island-under-autocast": island_under_autocast,
    "island-in-float32": island_in_float32,
    "whole-tree-cast": whole_tree_cast,
    "targets-shifted": targets_shifted,
    "last-token-dropped": last_token_dropped,
    "label-smoothing": label_smoothing,
    "batches-differ": batches_differ,
    "evaluation-drops": evaluation_drops,
    "logits-one-late": logits_one_late,
    "mask-without-micro-step": mask_keyed_without("micro-step"),
    "mask-without-layer": mask_keyed_without("layer"),
    "dropout-not-rescaled": dropout_not_rescaled,
    "dropout-redrawn": dropout_redrawn,
    "mask-probability": mask_probability,
    "sqrt-runs-block": sqrt_runs_block,
    "remat-does-nothing": remat_does_nothing,
    "moments-lost": loses("exp_avg_sq"),
    "adam-count-lost": loses("step"),
    "growth-tracker-lost": loses("growth tracker"),
    "tf32-left-on": tf32_left_on,
}
