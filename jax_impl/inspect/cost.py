"""Counts the bytes and the FLOPs of one optimizer step."""

import jax

from lockstep.data.batch import Batch

from ..step import Trainer
from .jaxprs import flops


def step_bytes(trainer: Trainer, window: Batch) -> int:
    """XLA's temporaries, as the compiled step itself accounts for them; nothing is run."""
    accounts = trainer.jitted_step().lower(trainer.state, window).compile().memory_analysis()
    assert accounts is not None
    return accounts.temp_size_in_bytes


def step_flops(trainer: Trainer, window: Batch) -> int:
    """Two for each multiply-add of each matmul, recomputed ones too."""
    return flops(jax.make_jaxpr(trainer.program)(trainer.state, window).jaxpr)
