"""Counts the bytes and the FLOPs of one optimizer step."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from lockstep.data.batch import Batch

from ..step import Trainer
from .live import Live


def step_bytes(trainer: Trainer, window: Batch) -> int:
    """The peak of activations and gradients; the update itself, in one kernel, needs no more."""
    if trainer.device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        trainer.accumulate(window)
        peak = torch.accelerator.max_memory_allocated() - before
    else:
        with Live() as live:
            trainer.accumulate(window)
        peak = live.peak
    trainer.optimizer.zero_grad(set_to_none=True)
    return peak


def step_flops(trainer: Trainer, window: Batch) -> int:
    """Two for each multiply-add of each matmul, recomputed ones too."""
    with FlopCounterMode(display=False) as counter:
        trainer.accumulate(window)
    trainer.optimizer.zero_grad(set_to_none=True)
    return counter.get_total_flops()
