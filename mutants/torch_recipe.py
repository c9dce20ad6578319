"""The optimizer step once more, with a place in it for each mistake that people make there.

With none of them it must be taken for `Trainer.optimizer_step` itself: that is one of the harmless
rewrites, and the check on this file.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from lockstep.twin import StepResult
from torch_ref import precision, step

MISTAKES = (
    *("loss-not-divided", "last-micro-batch-only", "clip-per-micro-batch", "clip-before-unscale"),
    *("scale-per-micro-batch", "no-unscale", "no-clip", "clip-per-tensor", "clip-by-value"),
    *("grad-norm-after-clip", "schedule-off-by-one", "schedule-in-float32", "skipped-step-decays"),
    *("skipped-step-counts", "skipped-step-schedule", "decay-not-times-lr", "zero-grad-forgotten"),
    *("accumulate-in-bfloat16", "bfloat16-master-weights", "moments-in-bfloat16"),
)


def with_mistake(wrong: str) -> Callable[[], None]:
    """The step with one of `MISTAKES`; with "" it is `Trainer.optimizer_step` written otherwise."""

    def plant() -> None:
        step.Trainer.optimizer_step = lambda self, window: optimizer_step(self, window, wrong)

    return plant


def optimizer_step(self: Any, window: Tensor, wrong: str) -> Callable[[], StepResult]:
    scaler, optimizer, config = self.scaler, self.optimizer, self.config.optim
    parameters = list(self.model.parameters())
    scale = scaler.get_scale()
    self.step += 1
    total = torch.zeros((), dtype=precision.dtype(self.roles.output), device=self.device)
    for micro_step, batch in enumerate(window):
        loss = self.batch_loss(self.model, batch, self.roles, self.dropout(micro_step))
        loss = loss / len(window)
        total += loss.detach()
        if wrong == "last-micro-batch-only":
            optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss * len(window) if wrong == "loss-not-divided" else loss).backward()
        if wrong == "clip-per-micro-batch":
            clip_grad_norm_(parameters, config.clip * scaler.get_scale())
        if wrong == "scale-per-micro-batch" and scaler.is_enabled():
            adjust(scaler, parameters)
        if wrong == "accumulate-in-bfloat16":
            for p in parameters:
                p.grad = p.grad.bfloat16().to(p.dtype)
    if wrong == "clip-before-unscale":
        clip_grad_norm_(parameters, config.clip)
    scaled = [p.grad.clone() for p in parameters]
    scaler.unscale_(optimizer)
    if wrong == "no-unscale":
        for p, grad in zip(parameters, scaled):
            p.grad = grad
    if wrong == "clip-per-tensor":
        for p in parameters:
            clip_grad_norm_([p], config.clip)
    if wrong == "clip-by-value":
        nn.utils.clip_grad_value_(parameters, config.clip)
    unclipped = ("clip-before-unscale", "clip-by-value", "no-clip")
    clip = math.inf if wrong in unclipped else config.clip
    norms = torch.stack([p.grad.norm() for p in parameters])
    norm = clip_grad_norm_(parameters, clip)
    if wrong == "grad-norm-after-clip":
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
    ahead = wrong == "schedule-off-by-one" and self.updates + 1 < len(self.rates)
    rate = float(self.rates[self.updates + ahead])
    if wrong == "schedule-in-float32":
        rate = float(torch.tensor(rate, dtype=torch.float32))
    for group in optimizer.param_groups:
        group["lr"] = rate
    before = [p.detach().clone() for p in parameters]
    scaler.step(optimizer)
    scaler.update()
    skipped = scaler.get_scale() < scale
    if wrong == "skipped-step-decays" and skipped:
        for p in parameters:
            p.data.mul_(1 - rate * config.weight_decay)
    if wrong == "skipped-step-counts" and skipped:
        for moments in optimizer.state.values():
            moments["step"] += 1
    if wrong == "decay-not-times-lr" and not skipped:
        for p, old in zip(parameters, before):
            if p.ndim > 1:
                p.data.sub_(config.weight_decay * old)
    if wrong == "bfloat16-master-weights":
        for p in parameters:
            p.data.copy_(p.data.bfloat16())
    if wrong == "moments-in-bfloat16":
        for moments in optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                moments[name].copy_(moments[name].bfloat16())
    if wrong == "zero-grad-forgotten":
        for p, grad in zip(parameters, scaled):
            p.grad = grad
    else:
        optimizer.zero_grad(set_to_none=True)
    self.updates += 1 if wrong == "skipped-step-schedule" else not skipped
    return self.result(total, norm, norms, rate, scale, skipped)


def adjust(scaler: Any, parameters: list[Tensor]) -> None:
    finite = all(p.grad is None or bool(p.grad.isfinite().all()) for p in parameters)
    found = torch.tensor(0.0 if finite else 1.0)
    torch._amp_update_scale_(
        scaler._scale,
        scaler._growth_tracker,
        found,
        scaler.get_growth_factor(),
        scaler.get_backoff_factor(),
        scaler.get_growth_interval(),
    )
