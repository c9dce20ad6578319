"""transformers' `Trainer`, its own loop, on our weights, batches, groups and rates.

`Trainer.train()` owns its loop: it runs as a coroutine that stands still in its data loader. What
a step reports is taken where `Trainer` computes it, by these hooks: `get_train_dataloader` (the
micro-batches), `training_step` (the loss), `_clip_grad_norm` (the norm before clipping), and the
callbacks `on_pre_optimizer_step` and `on_optimizer_step` (rate, loss scale, whether skipped).
"""

import gc
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from benchmarks.peers.coroutine import Coroutine, Feed
from benchmarks.peers.hf_common import (
    HuggingFace,
    MicroBatch,
    Record,
    Wait,
    mixed_precision,
)
from benchmarks.peers.hf_state import Trained
from lockstep.config import Config
from lockstep.model.state import TrainState
from lockstep.twin import StepResult


def arguments(config: Config, device: torch.device) -> TrainingArguments:
    """The config in TrainingArguments' own words; nothing is logged, saved or reported."""
    amp, optim = mixed_precision(config.precision), config.optim
    recomputes, cuda = config.execution.remat == "block", device.type == "cuda"
    return TrainingArguments(
        output_dir=tempfile.gettempdir(),  # is made where it does not exist; nothing is written
        max_steps=optim.steps,
        per_device_train_batch_size=optim.batch_size,
        gradient_accumulation_steps=optim.accum,
        max_grad_norm=optim.clip,
        bf16=amp == "bf16",
        fp16=amp == "fp16",
        tf32=config.precision.roles.tf32 if cuda else None,
        activation_checkpointing=recomputes,  # the new name of gradient_checkpointing
        activation_checkpointing_kwargs={"use_reentrant": False} if recomputes else None,
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
    """`lockstep.twin.Runner`, around one `Trainer.train()`."""

    framework = "hf-trainer"
    synchronous = False  # a step runs in the loop's thread

    def __init__(self, config: Config) -> None:
        super().__init__(config)
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

    def step(self, window: list[MicroBatch]) -> Callable[[], StepResult]:
        done = self.ready_loop.send(window)
        return lambda: done()()


def build(config: Config) -> HFTrainer:
    return HFTrainer(config)
