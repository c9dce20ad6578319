"""The JAX trainer: `python -m jax_impl.train --policy bf16`.

The loop is `lockstep/train/loop.py`, for both frameworks. It calls `jax_impl/twin.py`, which
builds the model (model.py) and takes its steps (step.py).
"""

import sys

from lockstep.cli import trainers
from lockstep.train.memory import share_heap


def main() -> int:
    """Trains as the command line says; returns the exit status.

    JAX is imported when the flags are known to be right: `--help` need not wait for it.
    """
    share_heap()  # so that what a step frees can be kept: `--autotune memory=kept`
    return trainers.train("jax")


if __name__ == "__main__":
    sys.exit(main())
