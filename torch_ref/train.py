"""The PyTorch trainer: `python -m torch_ref.train --policy bf16`.

The loop is `lockstep/train/loop.py`, for both frameworks. It calls `torch_ref/twin.py`, which
builds the model (model.py) and takes its steps (step.py).
"""

import sys

from lockstep.cli import trainers
from lockstep.process import wait_briefly


def main() -> int:
    """Trains with the command line's flags; returns the exit status.

    PyTorch is imported only after the flags are checked, so that `--help` is fast.
    """
    wait_briefly()
    return trainers.train("torch")


if __name__ == "__main__":
    sys.exit(main())
