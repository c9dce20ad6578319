"""The training loop of Accelerate's documentation, on our weights, batches, groups and rates.

https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation
"""

import gc
from collections.abc import Callable

import torch
from accelerate import Accelerator

from benchmarks.peers.hf_common import (
    HuggingFace,
    MicroBatch,
    Record,
    mixed_precision,
)
from benchmarks.peers.hf_state import Trained
from lockstep.config import Config
from lockstep.model.state import TrainState
from lockstep.twin import StepResult


class Loop:
    """The loop's body, with what the Accelerator has prepared."""

    def __init__(self, trained: Trained, device: torch.device, state: TrainState) -> None:
        config = trained.config
        self.trained, self.clip = trained, config.optim.clip
        if config.execution.remat == "block":
            trained.net.activation_checkpointing_enable({"use_reentrant": False})
        self.accelerator = Accelerator(
            mixed_precision=mixed_precision(config.precision),
            gradient_accumulation_steps=config.optim.accum,
            cpu=device.type == "cpu",
        )
        trained.load_scaler(self.accelerator.scaler, state)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(
            trained.net, trained.optimizer, trained.scheduler
        )
        self.model.train()
        self.record, self.steps = Record(self.accelerator), 0

    def step(self, window: list[MicroBatch]) -> Callable[[], StepResult]:
        """Accelerate passes over the optimizer and the schedule until the last micro-batch."""
        accelerator, record = self.accelerator, self.record
        for micro_batch in window:
            with accelerator.accumulate(self.model):
                loss = self.model(**micro_batch).loss
                accelerator.backward(loss)  # of loss / N
                if accelerator.sync_gradients:
                    record.norm = accelerator.clip_grad_norm_(self.model.parameters(), self.clip)
                    record.before(self.optimizer)
                self.optimizer.step()
                if accelerator.sync_gradients:
                    record.after()
                self.scheduler.step()
                self.optimizer.zero_grad()
            record.loss = record.loss + loss.detach() / len(window)
        self.steps += 1
        return record.take()


class AccelerateLoop(HuggingFace):
    """`lockstep.twin.Runner`, around that loop."""

    framework = "accelerate"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.synchronous = self.device.type == "cpu"
        self.loop: Loop | None = None

    def load(self, state: TrainState) -> None:
        self.loop = None
        gc.collect()  # prepared, a model is part of a cycle, and two need not fit
        self.loop = Loop(self.begin(state), self.device, state)

    @property
    def ready_loop(self) -> Loop:
        assert self.loop, "load a state first"
        self.require_claim()
        return self.loop

    def state(self) -> TrainState:
        loop = self.ready_loop
        return loop.trained.save(loop.steps, loop.accelerator.scaler)

    def step(self, window: list[MicroBatch]) -> Callable[[], StepResult]:
        return self.ready_loop.step(window)


def build(config: Config) -> AccelerateLoop:
    return AccelerateLoop(config)
