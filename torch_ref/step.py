"""One optimizer step over a window of micro-batches, in the order of every AMP recipe.

Each stage is a method of `Trainer`. `accumulate` runs micro_batch_loss and backward for each
micro-batch. The stages unscale, clip, update, update_scale and report follow once per window.

Under float16 the whole window is skipped if any micro-batch has a non-finite gradient: parameters,
moments and schedule do not change, and the loss scale shrinks. Other policies have no such check;
there `lockstep/train/loop.py` stops the run.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config import Config
from lockstep.config.policy import Roles
from lockstep.data.batch import Batch
from lockstep.train.schedule import learning_rates
from lockstep.twin import StepResult

from .dropout import Dropout
from .loss import mean_count, mean_loss
from .model import GPT
from .optim import adamw, clip_by_global_norm, gradient_norms
from .precision import autocast, dtype, grad_scaler


class Trainer:
    """Holds the training state and takes optimizer steps."""

    mesh: Any = None  # extra/mesh/mesh.py:OnMesh has one,
    rank = 0  # and this device's number on it

    def __init__(self, config: Config, model: GPT, device: torch.device) -> None:
        self.config, self.model, self.device = config, model, device
        self.roles: Roles = config.dtypes.policy
        self.names = list(self.params)
        self.module = self.wrap_model()
        self.optimizer = adamw(model, config.optim)
        self.rates = learning_rates(config.optim)
        self.scaler = grad_scaler(config.precision, device)
        self.steps = self.updates = 0  # attempted steps; those that were not skipped
        # Slots, which `extra/rules.py:make_trainer` fills with features.
        self.batch_loss: Callable[..., Tensor] = batch_loss
        self.evaluation_model: Callable[[], tuple[GPT, Roles]] = lambda: (self.model, self.roles)
        self.delayed: Any = None  # extra/formats/delayed.py:Delayed

    @property
    def params(self) -> dict[str, nn.Parameter]:
        """Returns the trained parameters by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def step(self, window: Batch) -> Callable[[], StepResult]:
        """Starts one step on a window (N, B, T); the returned call waits for its result."""
        scale, rate = self.scaler.get_scale(), float(self.rates[self.updates])
        self.steps += 1
        if self.delayed:
            self.delayed.begin_step()
        loss = self.accumulate(window)
        self.unscale()
        norm, norms = self.clip()
        self.update(rate)
        skipped = self.update_scale(scale)
        self.updates += not skipped  # so a skipped step does not advance the schedule
        if self.delayed:
            self.delayed.end_step(scale, skipped=skipped)
        return self.report(loss, norm, norms, rate, scale, skipped)

    def accumulate(self, window: Batch) -> Tensor:
        """Adds the scaled gradients of the window's mean loss to `.grad`; returns that loss."""
        total = torch.zeros((), dtype=dtype(self.roles.output), device=self.device)
        target_count = self.mean_count(window)
        for micro_step in range(window.tokens.shape[0]):
            total += self.micro_batch(window, target_count, micro_step)
        return total

    def micro_batch(self, window: Batch, target_count: Tensor | None, micro_step: int) -> Tensor:
        """Adds the gradient of one micro-batch; returns its part of the loss."""
        loss = self.micro_batch_loss(window, target_count, micro_step)
        self.backward(loss)
        if self.delayed:
            self.delayed.collect()
        return loss.detach()

    def micro_batch_loss(
        self, window: Batch, target_count: Tensor | None, micro_step: int
    ) -> Tensor:
        """Computes one micro-batch's part of the window's mean loss."""
        batch, dropout = window.select(micro_step), self.dropout(micro_step)
        loss = self.batch_loss(self.module, batch, self.roles, dropout, target_count)
        return loss / self.config.optim.accum

    def backward(self, loss: Tensor) -> None:
        """Scales the loss and adds its gradients to `.grad`."""
        self.scaler.scale(loss).backward()

    def unscale(self) -> None:
        """Unscales `.grad` in place; the scaler records gradients that are not finite."""
        self.scaler.unscale_(self.optimizer)

    def clip(self) -> tuple[Tensor, Tensor]:
        """Clips `.grad` in place; returns the norm before clipping and each tensor's (P,)."""
        parameters = list(self.params.values())
        norms = self.gradient_norms(parameters)
        return clip_by_global_norm(parameters, self.config.optim.clip, norms), norms

    def update(self, rate: float) -> None:
        """Steps AdamW; under float16 the scaler skips it if a gradient is not finite."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.scaler.step(self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)

    def update_scale(self, scale: float) -> bool:
        """Updates the loss scale; returns whether this step was skipped (it shrank, or was 0)."""
        self.scaler.update()
        return self.scaler.get_scale() < scale or scale == 0  # both are 1 if it is disabled

    def dropout(self, micro_step: int) -> Dropout:
        where = {"step": self.steps, "micro_step": micro_step, "rank": self.rank}
        rate, seed = self.config.model.dropout, self.config.optim.seed
        return Dropout(rate, seed=seed, strict=self.config.precision.strict, **where)

    def report(
        self, loss: Tensor, norm: Tensor, norms: Tensor, rate: float, scale: float, skipped: bool
    ) -> Callable[[], StepResult]:
        """Starts to copy the metrics to the host; the returned call waits for them."""
        metrics = torch.cat([x.to(loss.dtype).reshape(-1) for x in (loss, norm, norms)])
        host = metrics.to("cpu", non_blocking=True)
        copied = torch.Event(self.device) if self.device.type != "cpu" else None
        if copied:
            copied.record()

        def wait() -> StepResult:
            if copied:
                copied.synchronize()
            loss, norm, *each = host.tolist()
            norms = dict(zip(self.names, each, strict=True))
            return StepResult(loss, norm, rate, scale, skipped, norms)

        return wait

    @torch.no_grad()
    def evaluate(self, batches: Batch) -> Tensor:
        """Computes the mean loss of M batches (M, B, T) under the evaluation policy."""
        (model, roles), target_count = self.evaluation_model(), self.mean_count(batches)
        losses = [
            self.batch_loss(model, each, roles, None, target_count) for each in batches.split()
        ]
        return torch.stack(losses).mean()

    @torch.no_grad()
    def logits(self, batch: Batch) -> Tensor:
        """Computes logits (B, T, V) of a batch (B, T) under the evaluation policy."""
        model, roles = self.evaluation_model()
        with autocast(roles, self.device):
            return model(batch)

    # Overridden on a mesh: extra/mesh/mesh.py.

    def wrap_model(self) -> nn.Module:
        """Returns the module that a training pass calls; a mesh wraps the model."""
        return self.model

    def mean_count(self, window: Batch) -> Tensor | None:
        return mean_count(window)

    def gradient_norms(self, parameters: list[nn.Parameter]) -> Tensor:
        return gradient_norms([p.grad for p in parameters if p.grad is not None])


def batch_loss(
    model: Any, batch: Batch, roles: Roles, dropout: Dropout | None = None,
    target_count: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Computes the mean loss of a batch (B, T) in nats.

    Args:
        model: a `GPT`, or a wrapper around it.
        target_count: divides the sum over the targets that count; left out, their number.
    """
    target_count = mean_count(batch.select(None)) if target_count is None else target_count
    with autocast(roles, batch.tokens.device):
        return mean_loss(model(batch, dropout), batch, dtype(roles.output), target_count)
