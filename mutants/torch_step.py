"""Planted bugs of the step: each changes one stage of `Trainer`, or what a stage calls."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np

from lockstep.parity.bug import Bug
from mutants.configs import CLIPPED_FP16, DECODER, FP16, FROZEN, LEAN, LEAN_BF16
from mutants.declare import Declare, after_each, before_each, replaces, wraps
from mutants.patch import Later, Plant, after, assign, before, both, wrap

torch, amp, clip_grad = Later("torch"), Later("torch.amp"), Later("torch.nn.utils.clip_grad")
bridge, optim = Later("torch_ref.io.bridge"), Later("torch_ref.optim")
rules, step = Later("torch_ref.extra.rules"), Later("torch_ref.step")

Tensor = Any
Trainer = Any
BUGS: dict[str, Bug] = {}
bug = Declare("torch", BUGS)


def for_each(change: Callable[[Trainer, Tensor], Any]) -> Callable[..., None]:
    """Changes each trained parameter, without a gradient of that."""

    def act(trainer: Trainer, *_: Any) -> None:
        with torch.no_grad():
            for p in trainer.params.values():
                change(trainer, p)

    return act


# --- accumulation


@bug(rung=5)
@wraps(step, "Trainer.backward")
def loss_not_divided(right, self, loss):
    """N micro-batches add up to N times the gradient."""
    return right(self, loss * self.config.optim.accum)


@bug(rung=5)
@before_each(step, "Trainer.backward")
def last_micro_batch_only(self, loss):
    """Gradients are zeroed before each backward pass."""
    self.optimizer.zero_grad(set_to_none=True)


@bug(rung=5)
@after_each(step, "Trainer.backward")
def clip_per_micro_batch(self, loss):
    """Each micro-batch is clipped, not the window."""
    self.clip()


@bug(rung=5)
def accumulate_in_bfloat16() -> Plant:
    """The accumulator is bfloat16."""
    return after(
        step.Trainer, "backward", for_each(lambda self, p: p.grad.copy_(p.grad.bfloat16()))
    )


@bug(rung=8)
@wraps(step, "Trainer.update")
def zero_grad_forgotten(right: Callable, self: Trainer, rate: float) -> None:
    """Gradients are never zeroed."""
    with mock.patch.object(self.optimizer, "zero_grad", lambda **_: None):
        right(self, rate)


# --- clipping


def without_clip() -> Plant:
    return wrap(
        step,
        "clip_by_global_norm",
        lambda right, params, clip, norms: right(params, math.inf, norms),
    )


@bug(rung=4)
def no_clip() -> Plant:
    """The gradient is not clipped."""
    return without_clip()


@bug(rung=4, **LEAN_BF16, clip=0.5)
@wraps(step, "Trainer.clip")
def no_clip_in_half(right: Callable, self: Trainer) -> tuple[Tensor, Tensor]:
    """Under bf16 nothing is clipped."""
    clip = 1e9 if self.roles.mixed else self.config.optim.clip
    with mock.patch.object(self, "config", self.config.replace(clip=clip)):
        return right(self)


@bug(rung=4)
def clip_per_tensor() -> Plant:
    """Every tensor is clipped by itself."""
    return before(
        step.Trainer,
        "clip",
        for_each(lambda self, p: clip_grad.clip_grad_norm_([p], self.config.optim.clip)),
    )


@bug(rung=4)
def clip_by_value() -> Plant:
    """Elements are clipped, not the norm."""

    def clamp(self: Trainer, p: Tensor) -> None:
        p.grad.clamp_(-self.config.optim.clip, self.config.optim.clip)

    return both(without_clip(), before(step.Trainer, "clip", for_each(clamp)))


@bug(rung=4)
@wraps(step, "Trainer.clip")
def grad_norm_after_clip(right: Callable, self: Trainer) -> tuple[Tensor, Tensor]:
    """The norm is reported after clipping."""
    _, norms = right(self)
    return self.gradient_norms(list(self.params.values())).norm(), norms


# --- the loss scale


@bug(rung=8, **CLIPPED_FP16)
def clip_before_unscale() -> Plant:
    """Scaled gradients are clipped, then unscaled."""
    return both(
        without_clip(),
        before(
            step.Trainer,
            "unscale",
            lambda self: clip_grad.clip_grad_norm_(self.params.values(), self.config.optim.clip),
        ),
    )


@bug(rung=4, **FP16)
def no_unscale() -> Plant:
    """The optimizer gets scaled gradients, which are looked at for overflows."""
    return after(
        step.Trainer, "unscale", for_each(lambda self, p: p.grad.mul_(self.scaler.get_scale()))
    )


@bug(rung=7, **FP16)
@replaces(step, "grad_scaler")
def fp16_without_scaling(config, device):
    """Float16 gradients have no loss scale."""
    return amp.GradScaler(device.type, enabled=False)


@bug(rung=7, **FP16)
@after_each(step, "Trainer.backward")
def scale_per_micro_batch(self: Trainer, loss: Tensor) -> None:
    """The scale moves within a window, by the gradients so far."""
    scaler = self.scaler
    if scaler.is_enabled():
        finite = all(p.grad is None or p.grad.isfinite().all() for p in self.model.parameters())
        factors = scaler.get_growth_factor(), scaler.get_backoff_factor()
        state = scaler._scale, scaler._growth_tracker, torch.tensor(float(not finite))
        torch._amp_update_scale_(*state, *factors, scaler.get_growth_interval())


@bug(rung=7, **FP16)
@after_each(step, "Trainer.__init__")
def growth_one_late(self: Trainer, *_: Any) -> None:
    """The scale grows one step late, as in flax."""
    self.scaler.set_growth_interval(self.config.precision.loss_scale_interval + 1)


@bug(rung=7, **FP16)
@wraps(amp, "GradScaler._unscale_grads_")
def overflow_not_looked_for(right, *args):
    """No gradient is looked at for overflow."""
    return {device: torch.zeros_like(flag) for device, flag in right(*args).items()}


@bug(rung=7, **FP16)
@wraps(amp, "GradScaler._unscale_grads_")
def overflow_in_one_tensor(right: Callable, self: Any, optimizer: Any, *args: Any) -> dict:
    """One tensor alone is looked at."""
    right(self, optimizer, *args)
    grad = optimizer.param_groups[0]["params"][0].grad
    return {grad.device: (~grad.isfinite().all()).float()}


@bug(rung=7, **FP16)
@wraps(step, "Trainer.update_scale")
def skipped_step_counts(right: Callable, self: Trainer, scale: float) -> bool:
    """A skipped step advances Adam's count."""
    skipped = right(self, scale)
    for moments in self.optimizer.state.values():
        moments["step"] += skipped
    return skipped


@bug(rung=7, **FP16)
@wraps(step, "Trainer.step")
def skipped_step_schedule(right: Callable, self: Trainer, window: Any) -> Any:
    """A skipped step advances the schedule."""
    updates = self.updates + 1
    finish = right(self, window)
    self.updates = updates
    return finish


@bug(rung=7, **FP16)
@wraps(step, "Trainer.update_scale")
def skipped_step_decays(right: Callable, self: Trainer, scale: float) -> bool:
    """A skipped step decays the weights."""
    skipped = right(self, scale)
    factor = self.optimizer.param_groups[0]["lr"] * self.config.optim.weight_decay
    for p in self.params.values():
        p.data *= 1 - skipped * factor
    return skipped


@bug(rung=8, **CLIPPED_FP16)
@wraps(step, "Trainer.report")
def grad_norm_logged_scaled(
    right: Callable,
    self: Trainer,
    loss: Tensor,
    norm: Tensor,
    norms: Tensor,
    rate: float,
    scale: float,
    skipped: bool,
) -> Any:
    """The logged norm is the scaled gradient's."""
    return right(self, loss, norm * scale, norms, rate, scale, skipped)


# --- AdamW


def with_optim(change: Callable[[Any], Any]) -> Plant:
    """Makes AdamW from another config."""
    return wrap(step, "adamw", lambda right, model, config: right(model, change(config)))


def decay_also(kind: str) -> Plant:
    return wrap(optim, "decays", lambda right, name, *rest: right(name, *rest) or kind in name)


@bug(rung=4)
@wraps(optim, "AdamW.step")
def no_bias_correction(right: Callable, self: Any, *rest: Any, **how: Any) -> Any:
    """Adam has no bias correction, which tends to 1 as its count grows."""
    counts = [moments["step"] for moments in self.state.values()]
    torch._foreach_add_(counts, 1e7)
    result = right(self, *rest, **how)
    torch._foreach_add_(counts, -1e7)
    return result


@bug(rung=4)
def adam_eps(size: float = 1e-6) -> Plant:
    """Adam's epsilon is 1e-6 for 1e-8."""
    return assign(optim, "ADAM_EPS", size)


@bug(rung=4)
def betas_swapped() -> Plant:
    """Adam takes beta1 for beta2, and beta2 for beta1."""
    return with_optim(lambda config: replace(config, beta1=config.beta2, beta2=config.beta1))


@bug(rung=4)
def coupled_decay() -> Plant:
    """Decay is added to the gradient, as in Adam."""
    return assign(optim, "AdamW", torch.optim.Adam)


@bug(rung=4)
def decay(size: float = 0.1) -> Plant:
    """Weight decay is a tenth too strong."""
    return with_optim(lambda config: replace(config, weight_decay=config.weight_decay * (1 + size)))


@bug(rung=4)
def learning_rate(size: float = 0.1) -> Plant:
    """The rate is a tenth too high, and logged as the right one."""

    def use_higher_rate(self: Any, *_: Any, **__: Any) -> None:
        for group in self.param_groups:
            group["lr"] *= 1 + size

    return before(optim.AdamW, "step", use_higher_rate)


@bug(rung=4)
def decay_on_norms() -> Plant:
    """Norms decay."""
    return decay_also("norm")


@bug(rung=4)
def decay_on_embeddings() -> Plant:
    """Embeddings decay."""
    return decay_also("embed")


@bug(rung=4, **DECODER)
@wraps(optim, "decays")
def decay_of_all(right, name, patterns):
    """Matrices decay that no pattern names."""
    return right(name)


@bug(rung=4)
@wraps(optim, "AdamW.step")
def decay_not_times_lr(right: Callable, self: Any, *args: Any, **rest: Any) -> Any:
    """Decay is not multiplied by the learning rate."""
    matrices, weight_decay = (self.param_groups[0][name] for name in ("params", "weight_decay"))
    old = [p.detach().clone() for p in matrices]
    result = right(self, *args, **rest)
    for p, former in zip(matrices, old):
        p.data.sub_(weight_decay * former)
    return result


@bug(rung=4)
@after_each(optim, "AdamW.step")
def moments_in_bfloat16(self: Any, *_: Any, **__: Any) -> None:
    """Adam's moments are bfloat16."""
    for moments in self.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            moments[name].copy_(moments[name].bfloat16())


@bug(rung=4)
def bfloat16_master_weights() -> Plant:
    """Weights are rounded to bfloat16 after each step."""
    return after(step.Trainer, "update", for_each(lambda self, p: p.copy_(p.bfloat16())))


# --- what is frozen


@bug(rung=4, **FROZEN)
def frozen_in_norm() -> Plant:
    """Gradients of frozen parameters count in the clip norm."""

    def optimize_trained(right: Callable, model: Any, config: Any) -> Any:
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

    return both(
        assign(rules, "freeze", lambda model, trained: setattr(model, "trained", [*trained])),
        assign(
            step.Trainer,
            "params",
            property(
                lambda self: {
                    n: p for n, p in self.model.named_parameters() if n in self.config.trained
                }
            ),
        ),
        wrap(step, "adamw", optimize_trained),
        assign(step.Trainer, "clip", clip_with_frozen),
    )


@bug(rung=1, **FROZEN)
@after_each(step, "Trainer.update")
def frozen_decay(self: Trainer, rate: float) -> None:
    """Frozen matrices decay."""
    for p in self.model.parameters():
        if not p.requires_grad and p.ndim == 2:
            p.data.mul_(1 - rate * self.config.optim.weight_decay)


# --- the schedule


def with_rates(change: Callable[[np.ndarray], np.ndarray]) -> Plant:
    return wrap(step, "learning_rates", lambda right, config: change(right(config)))


@bug(rung=1)
def schedule_off_by_one() -> Plant:
    """Each update takes the next one's rate."""
    return with_rates(lambda rates: np.append(rates[1:], rates[-1]))


@bug(rung=1)
def schedule_in_float32() -> Plant:
    """The rates are rounded to float32, under float64."""
    return with_rates(lambda rates: rates.astype(np.float32))


@bug(rung=8, steps=40, **LEAN)
def rate_doubles_late() -> Plant:
    """From update 31 on the rate is a millionth too high."""
    return with_rates(lambda rates: np.where(np.arange(len(rates)) < 31, rates, rates * (1 + 1e-6)))


@bug(rung=10, **FP16)
@after_each(bridge, "load")
def schedule_by_steps_after_resume(trainer, state):
    """A resumed run's rate is that of its steps, not of its updates."""
    trainer.updates = state.step
