"""The JAX trainer: `python -m jax_impl.train --policy bf16`.

The loop is `lockstep/train/loop.py`, for both frameworks. It calls `jax_impl/twin.py`, which
builds the model (model.py) and takes its steps (step.py).
"""

import sys

from lockstep.cli import trainers
from lockstep.train.memory import keep_freed_memory


def main() -> int:
    """Trains as the command line says; returns the exit status.

    JAX is imported when the flags are known to be right: `--help` need not wait for it.
    """
    keep_freed_memory()  # XLA takes the memory of a step anew each time
    return trainers.train("jax")


if __name__ == "__main__":
    sys.exit(main())
