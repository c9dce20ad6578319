"""Mutants of the step: each replaces or wraps one stage of `Trainer`, or what a stage calls."""

# mypy: disable-error-code="union-attr"

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.amp import GradScaler

from mutants.patch import Plant, after, assign, before, both, edit, wrap
from torch_ref import optim, precision, step
from torch_ref.extra import rules
from torch_ref.io import bridge
from torch_ref.optim import AdamW
from torch_ref.step import Trainer

CLIP, STEP = "self.config.optim.clip", "self.scaler.step(self.optimizer)"


def behind(stage: Callable, text: str, *lines: str) -> Plant:
    """Puts lines behind a text of a stage, with which a line of it ends."""
    return edit(stage, text, "\n    ".join([text, *lines]))


def for_each(stage: Callable, text: str, change: str) -> Plant:
    """Changes each trained parameter `p` behind a text of a stage."""
    return behind(stage, text, "for p in self.params.values():", f"    {change}")


no_clip = wrap(step, "clip_by_global_norm", lambda right, params, clip, norms: right(
    params, math.inf, norms))  # fmt: skip


# --- the loss scale


def adjust_scale(self: Trainer, loss: Tensor) -> None:
    """The scale's update, by the gradients so far."""
    scaler = self.scaler
    if scaler.is_enabled():
        finite = all(p.grad is None or p.grad.isfinite().all() for p in self.model.parameters())
        factors = scaler.get_growth_factor(), scaler.get_backoff_factor()
        state: Any = scaler._scale, scaler._growth_tracker, torch.tensor(float(not finite))
        torch._amp_update_scale_(*state, *factors, scaler.get_growth_interval())


def find_in_one(right: Callable, self: GradScaler, optimizer: Any, *args: Any) -> dict:
    """All gradients are unscaled; an overflow counts in the first tensor's alone."""
    right(self, optimizer, *args)
    grad = optimizer.param_groups[0]["params"][0].grad
    return {grad.device: (~grad.isfinite().all()).float()}


# --- AdamW


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


def decay_also(kind: str) -> Plant:
    return wrap(optim, "decays", lambda right, name, *rest: right(name, *rest) or kind in name)


# --- what is frozen


def optimize_trained(right: Callable, model: Any, config: Any) -> AdamW:
    """Frozen parameters are left out of the optimizer, and have gradients."""
    chosen = {id(p) for name, p in model.named_parameters() if name in model.trained}
    optimizer = right(model, config)
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) in chosen]
    return optimizer


def clip_with_frozen(self: Trainer) -> tuple[Tensor, Tensor]:
    every = dict(self.model.named_parameters())
    norms = self.gradient_norms(list(every.values()))
    norm = optim.clip_by_global_norm(list(every.values()), self.config.optim.clip, norms)
    return norm, norms[[name in self.names for name in every]]


frozen_in_norm = both(
    assign(rules, "freeze", lambda model, trained: setattr(model, "trained", [*trained])),
    assign(Trainer, "params", property(lambda self: {
        n: p for n, p in self.model.named_parameters() if n in self.config.trained})),
    wrap(step, "adamw", optimize_trained),
    assign(Trainer, "clip", clip_with_frozen),
)  # fmt: skip


def with_rates(change: Callable[[np.ndarray], np.ndarray]) -> Plant:
    return wrap(step, "learning_rates", lambda right, config: change(right(config)))


BUGS: dict[str, Plant] = {
    "loss-not-divided": edit(Trainer.micro_batch_loss, " / self.config.optim.accum", ""),
    "last-micro-batch-only": before(
        Trainer, "backward", lambda self, loss: self.optimizer.zero_grad(set_to_none=True)
    ),
    "clip-per-micro-batch": behind(Trainer.backward, ".backward()", "self.clip()"),
    "accumulate-in-bfloat16": for_each(
        Trainer.backward, ".backward()", "p.grad = p.grad.bfloat16().to(p.dtype)"
    ),
    "zero-grad-forgotten": edit(Trainer.update, "self.optimizer.zero_grad(set_to_none=True)", ""),
    "no-clip": no_clip,
    "no-clip-in-half": edit(Trainer.clip, CLIP, f"1e9 if self.roles.mixed else {CLIP}"),
    "clip-per-tensor": for_each(
        Trainer.clip, "(self.params.values())", f"torch.nn.utils.clip_grad_norm_([p], {CLIP})"
    ),
    "clip-by-value": both(
        no_clip, for_each(Trainer.clip, "(self.params.values())", f"p.grad.clamp_(-{CLIP}, {CLIP})")
    ),
    "grad-norm-after-clip": edit(
        Trainer.clip, "return clip", "clip", ", norms), norms",
        ", norms)\n    return self.gradient_norms(parameters).norm(), norms",
    ),
    "clip-before-unscale": both(no_clip, edit(
        Trainer.unscale, "self.scaler.unscale_",
        f"torch.nn.utils.clip_grad_norm_(self.params.values(), {CLIP})\n    self.scaler.unscale_",
    )),
    # looked at for overflows, but not divided by the scale
    "no-unscale": for_each(
        Trainer.unscale, "(self.optimizer)", "p.grad *= self.scaler.get_scale()"
    ),
    "fp16-without-scaling": assign(
        step, "grad_scaler", lambda config, device: GradScaler(device.type, enabled=False)
    ),
    "scale-per-micro-batch": after(Trainer, "backward", adjust_scale),
    "growth-one-late": edit(precision.grad_scaler, "scale_interval,", "scale_interval + 1,"),
    "overflow-not-looked-for": wrap(GradScaler, "_unscale_grads_", lambda right, *args: {
        device: torch.zeros_like(flag) for device, flag in right(*args).items()}),
    "overflow-in-one-tensor": wrap(GradScaler, "_unscale_grads_", find_in_one),
    "skipped-step-counts": behind(
        Trainer.step, "self.update_scale(scale)",
        "for moments in self.optimizer.state.values():", "    moments['step'] += skipped",
    ),
    "skipped-step-schedule": edit(Trainer.step, "not skipped", "1"),
    "skipped-step-decays": for_each(
        Trainer.step, "self.update_scale(scale)",
        "p.data *= 1 - skipped * rate * self.config.optim.weight_decay",
    ),
    # the correction tends to 1 as Adam's count grows
    "no-bias-correction": edit(Trainer.update, STEP, "\n    ".join([
        "counts = [moments['step'] for moments in self.optimizer.state.values()]",
        "torch._foreach_add_(counts, 1e7)", STEP, "torch._foreach_add_(counts, -1e7)",
    ])),
    "adam-eps": assign(optim, "ADAM_EPS", 1e-6),
    "betas-swapped": edit(optim.adamw, "config.beta1, config.beta2", "config.beta2, config.beta1"),
    "coupled-decay": assign(optim, "AdamW", torch.optim.Adam),
    "decay": wrap(step, "adamw", lambda right, model, config, size=0.1: right(
        model, replace(config, weight_decay=config.weight_decay * (1 + size)))),
    "learning-rate": wrap(AdamW, "step", use_higher_rate),
    "decay-on-norms": decay_also("norm"),
    "decay-on-embeddings": decay_also("embed"),
    "decay-not-times-lr": wrap(AdamW, "step", decay_apart),
    "moments-in-bfloat16": behind(
        Trainer.update, STEP, "for moments in self.optimizer.state.values():",
        "    for name in ('exp_avg', 'exp_avg_sq'):",
        "        moments[name].copy_(moments[name].bfloat16())",
    ),
    "bfloat16-master-weights": for_each(Trainer.update, STEP, "p.data.copy_(p.data.bfloat16())"),
    "frozen-in-norm": frozen_in_norm,
    "frozen-decay": behind(
        Trainer.update, STEP, "for p in self.model.parameters():",
        "    if not p.requires_grad and p.ndim == 2:",
        "        p.data.mul_(1 - rate * self.config.optim.weight_decay)",
    ),
    "schedule-off-by-one": with_rates(lambda rates: np.append(rates[1:], rates[-1])),
    "rate-doubles-late": with_rates(lambda rates: np.where(  # from update 31 on
        np.arange(len(rates)) < 31, rates, rates * (1 + 1e-6))),
    "schedule-by-steps-after-resume": edit(bridge.load, "step, state.updates", "step, state.step"),
    "grad-norm-logged-scaled": edit(Trainer.report, "(loss, norm,", "(loss, norm * scale,"),
    "schedule-in-float32": with_rates(lambda rates: rates.astype(np.float32)),
}  # fmt: skip
