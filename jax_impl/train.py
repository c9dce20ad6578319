"""The JAX trainer: `python -m jax_impl.train --policy bf16`.

The loop is `lockstep/train/loop.py`, for both frameworks. It calls `jax_impl/twin.py`, which
builds the model (model.py) and takes its steps (step.py).
"""

import sys

from lockstep.cli import trainers


def main() -> int:
    """Trains with the command line's flags; returns the exit status.

    JAX is imported only after the flags are checked, so that `--help` is fast.
    """
    return trainers.train("jax")


if __name__ == "__main__":
    sys.exit(main())
