"""transformers' `Trainer`, its own loop, on our weights, batches, groups and rates.

`Trainer.train()` owns its loop: it runs as a coroutine that stands still in its data loader. What
a step reports is taken where `Trainer` computes it, by these hooks: `get_train_dataloader` (the
micro-batches), `training_step` (the loss), `_clip_grad_norm` (the norm before clipping), and the
callbacks `on_pre_optimizer_step` and `on_optimizer_step` (rate, loss scale, whether skipped).
"""

import gc
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from benchmarks.peers import on_torch
from benchmarks.peers.coroutine import Coroutine, Feed
from benchmarks.peers.hf_common import (
    HuggingFace,
    MicroBatch,
    Record,
    Wait,
    micro_batches,
    mixed_precision,
    tensors_of,
)
from benchmarks.peers.hf_state import Trained, make_model
from lockstep.config import Config
from lockstep.data.batch import Batch
from lockstep.errors import require
from lockstep.model.state import TrainState
from lockstep.twin import StepResult


def full_eval(config: Config) -> bool:
    """Whether the evaluation is `bf16_full_eval`, which casts the parameters too.

    That is the one policy, beside the training's own, under which `Trainer` evaluates.

    Raises:
        UserError: the evaluation has another one.
    """
    precision = config.precision
    whole = precision.eval_roles.param == "bfloat16"
    remedy = (
        "Trainer evaluates as it trains, or all in bfloat16; drop it or use "
        "params=bfloat16,compute=bfloat16,output=float32"
    )
    other = precision.eval_roles != precision.roles and not whole
    require(not other, "--eval-policy", precision.eval_policy, remedy)
    return whole


def arguments(config: Config, device: torch.device) -> TrainingArguments:
    """The config in TrainingArguments' own words; nothing is logged, saved or reported."""
    amp, optim = mixed_precision(config.precision), config.optim
    recomputes, cuda = config.execution.remat == "block", device.type == "cuda"
    return TrainingArguments(
        output_dir=tempfile.gettempdir(),  # is made where it does not exist; nothing is written
        max_steps=optim.steps,
        per_device_train_batch_size=optim.batch_size,
        per_device_eval_batch_size=optim.batch_size,
        gradient_accumulation_steps=optim.accum,
        max_grad_norm=optim.clip,
        bf16=amp == "bf16",
        fp16=amp == "fp16",
        bf16_full_eval=full_eval(config),
        tf32=config.precision.roles.tf32 if cuda else None,
        activation_checkpointing=recomputes,  # the new name of gradient_checkpointing
        activation_checkpointing_kwargs={"use_reentrant": False} if recomputes else None,
        torch_compile=config.execution.compile,
        use_cpu=not cuda,
        seed=optim.seed,
        remove_unused_columns=False,  # shift_labels is none of forward's named arguments
        logging_nan_inf_filter=False,  # it reads every micro-batch's loss: the host would wait
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        log_level="error",
    )


class Instrumented(Trainer):
    """`Trainer`, fed by a coroutine, that keeps what each step was."""

    def __init__(self, trained: Trained, args: TrainingArguments) -> None:
        optimizers = (trained.optimizer, trained.scheduler)
        super().__init__(model=trained.net, args=args, optimizers=optimizers)
        self.trained = trained
        self.record = Record(self.accelerator)
        self.feed = Feed(self.record.take)
        self.add_callback(Observer(self.record))
        self.remove_callback(PrinterCallback)

    def get_train_dataloader(self) -> Any:
        return self.feed

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Returns a share of the window's mean: `Trainer` divides by the window's targets."""
        loss = super().training_step(*args, **kwargs)
        self.record.loss = self.record.loss + loss
        return loss

    def _clip_grad_norm(self, model: Any) -> Tensor:
        self.record.norm = super()._clip_grad_norm(model)
        return self.record.norm

    def try_step(self, window: list[MicroBatch]) -> None:
        """Forward and backward of one micro-batch, which change nothing: they compile."""
        batches, targets = self.get_batch_samples(iter(window), len(window), self.args.device)
        super().training_step(self.model_wrapped, batches[0], targets)
        self.model_wrapped.zero_grad()

    def save(self) -> TrainState:
        return self.trained.save(self.state.global_step, self.accelerator.scaler)


class Observer(TrainerCallback):
    def __init__(self, record: Record) -> None:
        self.record = record

    def on_pre_optimizer_step(self, *unused: Any, **given: Any) -> None:
        self.record.before(given["optimizer"])

    def on_optimizer_step(self, *unused: Any, **given: Any) -> None:
        self.record.after()


class HFTrainer(HuggingFace):
    """`lockstep.twin.Runner`, around one `Trainer.train()`; with `evaluate`."""

    framework = "hf-trainer"
    synchronous = False  # a step runs in the loop's thread

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        full_eval(config)
        self.loop: Coroutine[Wait] | None = None

    def load(self, state: TrainState) -> None:
        self.close()
        trained = self.begin(state)
        self.trainer = Instrumented(trained, arguments(self.config, self.device))
        trained.load_scaler(self.trainer.accelerator.scaler, state)
        self.loop = Coroutine(self.trainer.feed, self.trainer.train)

    def close(self) -> None:
        """Ends the loop, as does dropping this object, and frees what it trained."""
        if self.loop:
            self.loop.join()
            self.loop = None
            del self.trainer
            gc.collect()  # prepared, a model is part of a cycle, and two need not fit

    @property
    def ready_loop(self) -> Coroutine[Wait]:
        assert self.loop, "load a state first"
        self.require_claim()
        return self.loop

    def state(self) -> TrainState:
        return self.ready_loop.call(self.trainer.save)

    def prepare(self) -> None:
        if self.config.execution.compile:
            try_step = partial(self.trainer.try_step, self.blank_window())
            self.ready_loop.call(partial(on_torch.compile_ahead, try_step))

    def step(self, window: list[MicroBatch]) -> Callable[[], StepResult]:
        done = self.ready_loop.send(window)
        return lambda: done()()

    def evaluate(self, batches: Batch) -> float:
        """Mean loss of plain batches (M, B, T): `Trainer.evaluate` on their rows."""
        rows: Any = micro_batches(*(x.flatten(0, 1) for x in tensors_of(batches)))
        return self.ready_loop.call(lambda: self.evaluator().evaluate(rows)["eval_loss"])

    def evaluator(self) -> Trainer:
        """The one that trains; for `bf16_full_eval` one for a copy of the model.

        It casts the model it is given and leaves it so, and casts nothing while it trains.
        """
        if not full_eval(self.config):
            return self.trainer
        net = make_model(self.config.replace(policy="fp32"), self.device)
        net.load_state_dict(self.trainer.trained.net.state_dict())
        copy = Trainer(model=net, args=self.trainer.args)
        copy.remove_callback(PrinterCallback)
        return copy


def build(config: Config) -> HFTrainer:
    return HFTrainer(config)
