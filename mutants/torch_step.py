"""Mutants of the step: each replaces or wraps one stage of `Trainer`, or what a stage calls."""

# mypy: disable-error-code="union-attr"

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from mutants.patch import Plant, after, assign, before, both, wrap
from torch_ref import optim, step
from torch_ref.extra import rules
from torch_ref.io import bridge
from torch_ref.optim import AdamW
from torch_ref.step import Trainer

# --- accumulation


def clip_micro_batch(self: Trainer, loss: Tensor) -> None:
    clip_grad_norm_(self.model.parameters(), self.config.optim.clip * self.scaler.get_scale())


def round_accumulator(self: Trainer, loss: Tensor) -> None:
    for p in self.model.parameters():
        p.grad = p.grad.bfloat16().to(p.dtype)


def keep_gradients(right: Callable, self: Trainer, rate: float) -> None:
    grads = [p.grad for p in self.model.parameters()]
    right(self, rate)
    for p, grad in zip(self.model.parameters(), grads):
        p.grad = grad


# --- clipping

no_clip = wrap(step, "clip_by_global_norm", lambda right, params, clip, norms: right(
    params, math.inf, norms))  # fmt: skip


def clip_all(self: Trainer) -> None:
    clip_grad_norm_(self.model.parameters(), self.config.optim.clip)


def clip_each(self: Trainer) -> None:
    for p in self.model.parameters():
        clip_grad_norm_([p], self.config.optim.clip)


def clip_values(self: Trainer) -> None:
    clip_grad_value_(self.model.parameters(), self.config.optim.clip)


def norm_after_clip(right: Callable, self: Trainer) -> tuple[Tensor, Tensor]:
    _, norms = right(self)
    return torch.stack([p.grad.norm() for p in self.model.parameters()]).norm(), norms


def clip_unless_half(right: Callable, self: Trainer) -> tuple[Tensor, Tensor]:
    """Clips nothing in autocast's dtypes."""
    if self.roles.compute not in ("bfloat16", "float16"):
        return right(self)
    norms = self.gradient_norms(list(self.params.values()))
    return torch.linalg.vector_norm(norms), norms


# --- the loss scale


def keep_scaled(right: Callable, self: Trainer) -> None:
    """Looked at for overflows, but not divided by the scale."""
    scaled = [p.grad.clone() for p in self.model.parameters()]
    right(self)
    for p, grad in zip(self.model.parameters(), scaled):
        p.grad = grad


def adjust_scale(self: Trainer, loss: Tensor) -> None:
    """The scale's update, by the gradients so far."""
    scaler = self.scaler
    if scaler.is_enabled():
        finite = all(p.grad is None or p.grad.isfinite().all() for p in self.model.parameters())
        factors = scaler.get_growth_factor(), scaler.get_backoff_factor()
        state: Any = scaler._scale, scaler._growth_tracker, torch.tensor(float(not finite))
        torch._amp_update_scale_(*state, *factors, scaler.get_growth_interval())


def grow_late(right: Callable, config: Any, device: torch.device) -> GradScaler:
    scaler = right(config, device)
    if scaler.is_enabled():
        scaler.set_growth_interval(scaler.get_growth_interval() + 1)
    return scaler


def find_nothing(right: Callable, *args: Any) -> Any:
    return {device: torch.zeros_like(flag) for device, flag in right(*args).items()}


def find_in_one(right: Callable, self: GradScaler, optimizer: Any, *args: Any) -> dict:
    """All gradients are unscaled; an overflow counts in the first tensor's alone."""
    right(self, optimizer, *args)
    grad = optimizer.param_groups[0]["params"][0].grad
    return {grad.device: (~grad.isfinite().all()).float()}


def on_skip(act: Callable[[Any], None]) -> Plant:
    """Acts after each step that was skipped."""

    def wrong(right: Callable, self: Trainer, scale: float) -> bool:
        skipped = right(self, scale)
        if skipped:
            act(self)
        return skipped

    return wrap(Trainer, "update_scale", wrong)


def decay_weights(self: Trainer) -> None:
    for p in self.model.parameters():
        p.data.mul_(1 - self.rates[self.updates] * self.config.optim.weight_decay)


def add_to_count(number: int, optimizer: Any) -> None:
    for moments in optimizer.state.values():
        moments["step"] += number


def advance_schedule(self: Trainer) -> None:
    self.updates += 1


# --- AdamW


def without_bias_correction(right: Callable, self: Any, *args: Any, **rest: Any) -> Any:
    """Adam's correction tends to 1 as its count grows."""
    far = 10_000_000
    add_to_count(far, self)
    result = right(self, *args, **rest)
    add_to_count(-far, self)
    return result


def decay_apart(right: Callable, self: Any, *args: Any, **rest: Any) -> Any:
    (matrices, decay), _ = ((group["params"], group["weight_decay"]) for group in self.param_groups)
    old = [p.detach().clone() for p in matrices]
    result = right(self, *args, **rest)
    for p, former in zip(matrices, old):
        p.data.sub_(decay * former)
    return result


def use_higher_rate(right: Callable, self: Any, *args: Any, size: float = 0.1, **rest: Any) -> Any:
    """The rate that is logged is right; the one that is used is not."""
    for group in self.param_groups:
        group["lr"] *= 1 + size
    return right(self, *args, **rest)


def with_decay(right: Callable, model: Any, config: Any, size: float = 0.1) -> AdamW:
    return right(model, replace(config, weight_decay=config.weight_decay * (1 + size)))


def swap_betas(right: Callable, model: Any, config: Any) -> AdamW:
    return right(model, replace(config, beta1=config.beta2, beta2=config.beta1))


def round_weights(self: Trainer, rate: float) -> None:
    for p in self.model.parameters():
        p.data.copy_(p.data.bfloat16())


def round_moments(self: Trainer, rate: float) -> None:
    for moments in self.optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            moments[name].copy_(moments[name].bfloat16())


def decay_also(kind: str) -> Plant:
    return wrap(optim, "decays", lambda right, name, *rest: right(name, *rest) or kind in name)


# --- what is frozen


def only_trained(self: Trainer) -> dict[str, Any]:
    return {n: p for n, p in self.model.named_parameters() if n in self.config.trained}


def optimize_trained(right: Callable, model: Any, config: Any) -> AdamW:
    """Frozen parameters are left out of the optimizer, and have gradients."""
    chosen = {id(p) for name, p in model.named_parameters() if name in model.trained}
    optimizer = right(model, config)
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) in chosen]
    return optimizer


def keep_gradients_of_all(model: Any, trained: Iterable[str]) -> None:
    model.trained = [*trained]


def clip_with_frozen(self: Trainer) -> tuple[Tensor, Tensor]:
    every = dict(self.model.named_parameters())
    norms = self.gradient_norms(list(every.values()))
    norm = optim.clip_by_global_norm(list(every.values()), self.config.optim.clip, norms)
    return norm, norms[[name in self.names for name in every]]


frozen_in_norm = both(
    assign(rules, "freeze", keep_gradients_of_all),
    assign(Trainer, "params", property(only_trained)),
    wrap(step, "adamw", optimize_trained),
    assign(Trainer, "clip", clip_with_frozen),
)


def decay_frozen(self: Trainer, rate: float) -> None:
    for p in self.model.parameters():
        if not p.requires_grad and p.ndim == 2:
            p.data.mul_(1 - rate * self.config.optim.weight_decay)


def with_rates(change: Callable[[np.ndarray], np.ndarray]) -> Plant:
    return wrap(step, "learning_rates", lambda right, config: change(right(config)))


def place_by_steps(trainer: Trainer, state: Any) -> None:
    """A resumed run's place in the schedule is that of its steps, not of its updates."""
    ahead = state.step - state.updates
    rates = step.learning_rates(trainer.config.optim)
    trainer.rates = np.concatenate([rates[ahead:], rates[len(rates) - ahead :]])


def log_scaled(right: Callable, self: Trainer) -> tuple[Tensor, Tensor]:
    norm, norms = right(self)
    return norm * self.scaler.get_scale(), norms


def raise_late(rates: np.ndarray) -> np.ndarray:
    """From update 31 on."""
    return np.where(np.arange(len(rates)) < 31, rates, rates * (1 + 1e-6))


BUGS: dict[str, Plant] = {
    "loss-not-divided": wrap(
        Trainer, "backward", lambda right, self, loss: right(self, loss * self.config.optim.accum)
    ),
    "last-micro-batch-only": before(
        Trainer, "backward", lambda self, loss: self.optimizer.zero_grad(set_to_none=True)
    ),
    "clip-per-micro-batch": after(Trainer, "backward", clip_micro_batch),
    "accumulate-in-bfloat16": after(Trainer, "backward", round_accumulator),
    "zero-grad-forgotten": wrap(Trainer, "update", keep_gradients),
    "no-clip": no_clip,
    "no-clip-in-half": wrap(Trainer, "clip", clip_unless_half),
    "clip-per-tensor": before(Trainer, "clip", clip_each),
    "clip-by-value": both(no_clip, before(Trainer, "clip", clip_values)),
    "grad-norm-after-clip": wrap(Trainer, "clip", norm_after_clip),
    "clip-before-unscale": both(no_clip, before(Trainer, "unscale", clip_all)),
    "no-unscale": wrap(Trainer, "unscale", keep_scaled),
    "fp16-without-scaling": assign(
        step, "grad_scaler", lambda config, device: GradScaler(device.type, enabled=False)
    ),
    "scale-per-micro-batch": after(Trainer, "backward", adjust_scale),
    "growth-one-late": wrap(step, "grad_scaler", grow_late),
    "overflow-not-looked-for": wrap(GradScaler, "_unscale_grads_", find_nothing),
    "overflow-in-one-tensor": wrap(GradScaler, "_unscale_grads_", find_in_one),
    "skipped-step-counts": on_skip(lambda self: add_to_count(1, self.optimizer)),
    "skipped-step-schedule": on_skip(advance_schedule),
    "skipped-step-decays": on_skip(decay_weights),
    "no-bias-correction": wrap(AdamW, "step", without_bias_correction),
    "adam-eps": assign(optim, "ADAM_EPS", 1e-6),
    "betas-swapped": wrap(step, "adamw", swap_betas),
    "coupled-decay": assign(optim, "AdamW", torch.optim.Adam),
    "decay": wrap(step, "adamw", with_decay),
    "learning-rate": wrap(AdamW, "step", use_higher_rate),
    "decay-on-norms": decay_also("norm"),
    "decay-on-embeddings": decay_also("embed"),
    "decay-not-times-lr": wrap(AdamW, "step", decay_apart),
    "moments-in-bfloat16": after(Trainer, "update", round_moments),
    "bfloat16-master-weights": after(Trainer, "update", round_weights),
    "frozen-in-norm": frozen_in_norm,
    "frozen-decay": after(Trainer, "update", decay_frozen),
    "schedule-off-by-one": with_rates(lambda rates: np.append(rates[1:], rates[-1])),
    "rate-doubles-late": with_rates(raise_late),
    "schedule-by-steps-after-resume": after(bridge, "load", place_by_steps),
    "grad-norm-logged-scaled": wrap(Trainer, "clip", log_scaled),
    "schedule-in-float32": with_rates(lambda rates: rates.astype(np.float32)),
}
