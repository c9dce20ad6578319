"""One optimizer step over a window of micro-batches, in the order every AMP recipe gives.

A stage is a method of `Trainer`: micro_batch_loss, backward; unscale, clip, update, update_scale,
report. One decision per optimizer step: if any gradient of any micro-batch was not finite, nothing
moves but the scale.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lockstep.config import Config
from lockstep.config.kinds import NO_FLOAT64
from lockstep.config.policy import Dtypes
from lockstep.data.batch import Batch
from lockstep.errors import UserError
from lockstep.formats.table import HISTORY
from lockstep.model.params import first_nonfinite
from lockstep.train.schedule import learning_rates
from lockstep.twin import StepResult

from .dropout import Dropout
from .extra.formats.delayed import give_scales, join, record, take
from .extra.mesh.mesh import accumulate, distribute, make_mesh, mean, own_rows, whole_state
from .extra.mesh.processes import rank
from .loss import mean_loss, mean_loss_in_chunks
from .model import GPT, Tap, no_tap
from .optim import adamw, clip_by_global_norm
from .precision import attention_kernel, autocast, choose_products, dtype, grad_scaler

Tensors = dict[str, Tensor]

PINNED = ("cuda", "xpu")  # they copy from locked memory while the host goes on


def make_model(config: Config, dtypes: Dtypes, device: torch.device, *, plain: bool = False) -> GPT:
    """The model of one policy, not yet loaded; `plain` keeps everything."""
    dtypes = choose_products(dtypes, device)
    kernel = attention_kernel(config, dtypes, device)
    remat = "none" if plain else config.execution.remat
    with device:
        model = GPT(config.model, dtypes, kernel=kernel, remat=remat)
    return model.to(dtype(dtypes.param))


def batch_loss(
    model: GPT,
    batch: Batch,
    dtypes: Dtypes,
    dropout: Dropout | None = None,
    tap: Tap = no_tap,
    chunks: int = 1,
    over: Tensor | None = None,
) -> Tensor:
    """Mean loss of a batch (B, T); the logits of all, or of a chunk of rows at a time. Where some
    targets do not count, it is a sum over `over`: left out, over those that count."""
    tokens, targets, counts, segments = batch
    over = mean_count(batch.select(None)) if over is None else over
    with autocast(dtypes, tokens.device):
        if chunks > 1:
            x_RD = model.rows(tokens, dropout, tap, segments)
            targets_R, counts_R = targets.flatten(), None if counts is None else counts.flatten()
            how = (dtypes, chunks, counts_R, over)
            return mean_loss_in_chunks(model.logits, x_RD, targets_R, *how)
        return mean_loss(model(tokens, dropout, tap, segments), targets, dtypes, counts, over)


def mean_count(window: Batch, mesh: DeviceMesh | None = None) -> Tensor | None:
    """How many targets count in a micro-batch of a window, on average; None where all do.

    Of a mesh, on average of its devices. At least one in the whole window: of one without any the
    loss and its gradient are 0.
    """
    if window.counts is None:
        return None
    wide = torch.float32 if window.counts.device.type in NO_FLOAT64 else torch.float64
    count = mean(window.counts.sum().to(wide), mesh)
    return torch.where(count > 0, count, 1) / len(window.counts)


class Trainer:
    """What a step changes, and the step that changes it."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self.config, self.device = config, device
        self.dtypes, self.eval_dtypes = config.dtypes, config.eval_dtypes
        self.mesh = make_mesh(config, device)
        self.model = make_model(config, self.dtypes, device)
        self.freeze()
        self.names = list(self.params)
        self.parallel = distribute(self.model, self.mesh)
        self.optimizer = adamw(self.model, config.optim)
        self.rates = learning_rates(config.optim)
        self.scaler = grad_scaler(config.precision, device)
        self.steps = self.updates = 0
        empty = torch.zeros(3, HISTORY, device=device)
        self.amaxes = dict.fromkeys(self.dtypes.histories, empty)
        give_scales(self.model, self.amaxes, self.scaler.get_scale())
        self.batch_loss = torch.compile(batch_loss) if config.execution.compile else batch_loss

    def freeze(self) -> None:
        """All but what the run trains."""
        trained = set(self.config.trained)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name in trained)

    @property
    def params(self) -> dict[str, torch.nn.Parameter]:
        """Those that are trained."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def compile(self, window: Batch) -> None:
        """Compiles the loss ahead of time, for windows like this one, by running it once.

        Raises:
            UserError: the compiler fails, for want of a C++ compiler for example.
        """
        if not self.config.execution.compile:
            return
        try:
            self.micro_batch_loss(window, mean_count(window), 0).backward()
        except torch._dynamo.exc.BackendCompilerFailed as error:
            reason = str(error).partition("\n")[0]
            remedy = "install what it misses or drop --compile"
            raise UserError(f"--compile: torch.compile failed ({reason}); {remedy}") from None
        self.optimizer.zero_grad(set_to_none=True)

    def place(self, batch: Batch) -> Batch:
        return batch.map_arrays(self.place_array)

    def place_array(self, x: Tensor) -> Tensor:
        """(..., B, T) of all devices; whole numbers become int64."""
        x = own_rows(x, self.mesh)
        x = x if x.dtype == torch.bool else x.long()
        if self.device.type in PINNED:
            x = x.contiguous().pin_memory()
        return x.to(self.device, non_blocking=True)

    def step(self, window: Batch) -> Callable[[], StepResult]:
        """Window (N, B, T) -> a call that waits for the result."""
        scale, rate = self.scaler.get_scale(), float(self.rates[self.updates])
        self.steps += 1
        loss, found = self.accumulate(window)
        self.unscale()
        norm, norms = self.clip()
        self.update(rate)
        skipped = self.update_scale(scale)
        self.update_amaxes(found, scale, skipped)
        self.updates += not skipped  # and so the schedule stands still on a skipped step
        return self.report(loss, norm, norms, rate, scale, skipped)

    def accumulate(self, window: Batch) -> tuple[Tensor, Tensors]:
        """Adds the scaled gradients of the window's mean loss to `.grad`.

        Returns that loss, and the amaxes of delayed scaling.
        """
        total = torch.zeros((), dtype=dtype(self.dtypes.output), device=self.device)
        over, found, accum = mean_count(window, self.mesh), Tensors(), len(window.tokens)
        take(self.model, self.amaxes)  # of what was no step
        for micro_step in range(accum):
            with accumulate(self.parallel, last=micro_step == accum - 1):
                loss = self.micro_batch_loss(window, over, micro_step)
                self.backward(loss)
            found = join(found, take(self.model, self.amaxes))
            total += loss.detach()
        return mean(total, self.mesh), found

    def micro_batch_loss(self, window: Batch, over: Tensor | None, micro_step: int) -> Tensor:
        """One micro-batch's part of the window's mean loss."""
        model, dropout, batch = self.parallel, self.dropout(micro_step), window.select(micro_step)
        how: dict[str, Any] = {"chunks": self.config.chunks, "over": over}
        return self.batch_loss(model, batch, self.dtypes, dropout, **how) / len(window.tokens)

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def unscale(self) -> None:
        """And looks for gradients that are not finite."""
        self.scaler.unscale_(self.optimizer)

    def clip(self) -> tuple[Tensor, Tensor]:
        """The norm of the gradient before clipping, and those of its tensors (P,)."""
        return clip_by_global_norm(list(self.params.values()), self.config.optim.clip, self.mesh)

    def update(self, rate: float) -> None:
        """One step of AdamW, unless a gradient was not finite."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.scaler.step(self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)

    def update_scale(self, scale: float) -> bool:
        """Whether the step was skipped."""
        self.scaler.update()
        return self.scaler.get_scale() < scale  # get_scale is 1 where the scaler is disabled

    def update_amaxes(self, found: Tensors, scale: float, skipped: bool) -> None:
        """Of delayed scaling: what this step has seen, unless it was skipped, for the next one's
        scales."""
        if not skipped:
            self.amaxes = record(self.amaxes, found, scale)
        give_scales(self.model, self.amaxes, self.scaler.get_scale())

    def dropout(self, micro_step: int) -> Dropout:
        config = self.config
        return Dropout(
            config.model.dropout,
            seed=config.optim.seed,
            step=self.steps,
            micro_step=micro_step,
            rank=rank(),
            strict=config.precision.strict,
        )

    def report(
        self, loss: Tensor, norm: Tensor, norms: Tensor, rate: float, scale: float, skipped: bool
    ) -> Callable[[], StepResult]:
        """Starts the copy to the host now, waits for it when called."""
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
            if math.isfinite(norm):
                return StepResult(loss, norm, rate, scale, skipped, norms=norms)
            nonfinite = self.first_nonfinite(map(math.isfinite, norms.values()))
            return StepResult(loss, norm, rate, scale, skipped, nonfinite)

        return wait

    def first_nonfinite(self, finite: Iterable[bool]) -> str:
        return first_nonfinite(zip(self.names, finite, strict=True), self.config.model)

    def loss_and_grads(self, batch: Batch) -> tuple[Tensor, Tensors]:
        """Mean loss and unscaled gradients of one batch, as training takes them."""
        chunks, over = self.config.chunks, mean_count(batch.select(None), self.mesh)
        loss = self.batch_loss(self.parallel, batch, self.dtypes, chunks=chunks, over=over)
        self.scaler.scale(loss).backward()
        grads = self.unscale_grads(self.params)
        self.optimizer.zero_grad(set_to_none=True)
        return mean(loss.detach(), self.mesh), grads

    def unscale_grads(self, tensors: Mapping[str, Tensor]) -> Tensors:
        """Their `.grad`, at least in float32: in float16 they would flush to zero."""
        scale = self.scaler.get_scale()
        grads = {name: x.grad for name, x in tensors.items() if x.grad is not None}
        wide = {name: torch.promote_types(g.dtype, torch.float32) for name, g in grads.items()}
        return {name: g.to(wide[name]) / scale for name, g in grads.items()}

    @torch.no_grad()
    def evaluate(self, batches: Batch) -> Tensor:
        """Mean loss of M batches under the evaluation policy."""
        model, chunks = self.evaluation_model(), self.config.chunks
        over = mean_count(batches, self.mesh)
        loss = partial(batch_loss, model, dtypes=self.eval_dtypes, chunks=chunks, over=over)
        return mean(torch.stack([loss(batch) for batch in batches.split()]).mean(), self.mesh)

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """Tokens (B, T) -> logits (B, T, V) under the evaluation policy."""
        with autocast(self.eval_dtypes, self.device):
            return self.evaluation_model()(tokens)

    def evaluation_model(self) -> GPT:
        """The model's weights in the evaluation policy, which scales by what training recorded."""
        if self.eval_dtypes == self.dtypes:
            return self.model
        model = make_model(self.config, self.eval_dtypes, self.device)
        model.load_state_dict(whole_state(self.model))
        known = {name: self.amaxes[name] for name in self.eval_dtypes.histories}
        give_scales(model, known, self.scaler.get_scale())
        return model
