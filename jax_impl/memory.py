"""What one optimizer step needs beside its state."""

import numpy as np

from jax_impl.step import Trainer


def step_bytes(trainer: Trainer, window: np.ndarray) -> int:
    """XLA's temporaries, as the compiled step itself accounts for them; nothing is run."""
    step = trainer.jit(trainer.step_function, donate_argnums=0)
    accounts = step.lower(trainer.state, window).compile().memory_analysis()
    assert accounts is not None
    return accounts.temp_size_in_bytes
